// Package browser opens pages in a Chromium without a window, for tests: it asks what they show, presses keys and takes pictures.
//
// It must not know any page.
package browser

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"image"
	"image/color"
	"image/png"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/testkit"
)

// Browser is a Chromium without a window, which the DevTools protocol drives by a pair of pipes (https://chromedevtools.github.io/devtools-protocol/).
type Browser struct {
	t     *testing.T
	write *os.File

	mu      sync.Mutex
	last    int
	answers map[int]chan message
	// said is what tabs complain of, by session.
	said map[string][]string
	over error
}

// message is one of the protocol: a call, its answer, or an event.
type message struct {
	ID      int             `json:"id,omitempty"`
	Session string          `json:"sessionId,omitempty"`
	Method  string          `json:"method,omitempty"`
	Params  any             `json:"params,omitempty"`
	Result  json.RawMessage `json:"result,omitempty"`
	Error   *struct {
		Message string `json:"message"`
	} `json:"error,omitempty"`
}

// New starts Chromium, which ends with the test.
func New(t *testing.T) *Browser {
	t.Helper()
	path, err := exec.LookPath("chromium")
	if err != nil {
		t.Fatalf("%v: hack/setup.sh test installs it", err)
	}
	theirRead, ourWrite, err := os.Pipe()
	testkit.Check(t, err)
	ourRead, theirWrite, err := os.Pipe()
	testkit.Check(t, err)
	dir := t.TempDir()
	// Root has no sandbox; the pages are our own. Without --disable-dev-shm-usage a small /dev/shm ends tabs.
	cmd := exec.Command(path, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions",
		"--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--force-color-profile=srgb", "--lang=en-US",
		"--user-data-dir="+filepath.Join(dir, "profile"), "--crash-dumps-dir="+dir, "--remote-debugging-pipe", "about:blank")
	cmd.Env = append(os.Environ(), "HOME="+dir, "TMPDIR="+dir, "TZ=UTC", "DBUS_SESSION_BUS_ADDRESS=unix:path=/nowhere")
	cmd.ExtraFiles = []*os.File{theirRead, theirWrite}
	var complaints bytes.Buffer
	cmd.Stdout, cmd.Stderr = &complaints, &complaints
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	testkit.Check(t, cmd.Start(), theirRead.Close(), theirWrite.Close())
	b := &Browser{t: t, write: ourWrite, answers: map[int]chan message{}, said: map[string][]string{}}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		b.read(ourRead)
	}()
	t.Cleanup(func() {
		ourWrite.Close()
		if err := syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL); err != nil { // all processes of it
			t.Error(err)
		}
		_ = cmd.Wait() // it was killed
		ourRead.Close()
		<-ended
		if t.Failed() {
			for line := range strings.Lines(complaints.String()) {
				if !strings.Contains(line, "dbus") { // it does without
					t.Logf("chromium: %s", line)
				}
			}
		}
		// The last of its processes may still write.
		testkit.Eventually(t, 20*time.Second, "remove the profile", func() error { return os.RemoveAll(dir) })
	})
	return b
}

// read reads messages, each of which ends in a zero byte.
func (b *Browser) read(from *os.File) {
	for r := bufio.NewReader(from); ; {
		text, err := r.ReadBytes(0)
		if err != nil {
			b.mu.Lock()
			b.over = fmt.Errorf("chromium has ended: %w", err)
			for id, answer := range b.answers {
				delete(b.answers, id)
				close(answer)
			}
			b.mu.Unlock()
			return
		}
		var m message
		if json.Unmarshal(bytes.TrimSuffix(text, []byte{0}), &m) != nil {
			continue
		}
		b.mu.Lock()
		if answer := b.answers[m.ID]; answer != nil {
			delete(b.answers, m.ID)
			answer <- m
		}
		switch m.Method {
		case "Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded":
			b.said[m.Session] = append(b.said[m.Session], complaint(m))
		}
		b.mu.Unlock()
	}
}

// complaint is what a page says of itself.
func complaint(event message) string {
	var says struct {
		ExceptionDetails struct{ Exception struct{ Description string } }
		Entry            struct{ Text, URL string }
		Args             []struct{ Value, Description any }
	}
	text, err := json.Marshal(event.Params)
	if err == nil {
		err = json.Unmarshal(text, &says)
	}
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(fmt.Sprint(event.Method, " ", says.ExceptionDetails.Exception.Description, says.Entry.Text, " ", says.Entry.URL, " ", says.Args))
}

// call calls a method, of the browser or of a session.
func (b *Browser) call(session, method string, params, result any) error {
	answer := make(chan message, 1)
	b.mu.Lock()
	b.last++
	m := message{ID: b.last, Session: session, Method: method, Params: params}
	if b.over != nil {
		b.mu.Unlock()
		return b.over
	}
	b.answers[m.ID] = answer
	b.mu.Unlock()
	text, err := json.Marshal(m)
	if err == nil {
		_, err = b.write.Write(append(text, 0))
	}
	if err != nil {
		return fmt.Errorf("%s: %w", method, err)
	}
	select {
	case m, ok := <-answer:
		switch {
		case !ok:
			return errors.New("chromium has ended")
		case m.Error != nil:
			return fmt.Errorf("%s: %s", method, m.Error.Message)
		case result == nil:
			return nil
		}
		return json.Unmarshal(m.Result, result)
	case <-time.After(testkit.Timeout(time.Minute)):
		return fmt.Errorf("%s: no answer", method)
	}
}

// Tab is a page in the browser.
type Tab struct {
	*Browser
	target, session string
}

// Object is one of JSON.
type Object = map[string]any

// Open opens a page of a width.
func (b *Browser) Open(url string, width int) *Tab {
	b.t.Helper()
	var target struct{ TargetID string }
	var session struct{ SessionID string }
	testkit.Check(b.t, b.call("", "Target.createTarget", Object{"url": "about:blank"}, &target))
	testkit.Check(b.t, b.call("", "Target.attachToTarget", Object{"targetId": target.TargetID, "flatten": true}, &session))
	p := &Tab{b, target.TargetID, session.SessionID}
	for _, method := range []string{"Page.enable", "Runtime.enable", "Log.enable"} {
		p.Do(method, Object{})
	}
	p.Size(width, 900)
	p.Do("Page.navigate", Object{"url": url})
	return p
}

// Do calls a method of the protocol.
func (p *Tab) Do(method string, params Object) {
	p.t.Helper()
	testkit.Check(p.t, p.call(p.session, method, params, nil))
}

// Close closes the page.
func (p *Tab) Close() {
	p.t.Helper()
	testkit.Check(p.t, p.call("", "Target.closeTarget", Object{"targetId": p.target}, nil))
}

// Size sets the width and the height of the window. A narrow one is a phone.
func (p *Tab) Size(width, height int) {
	p.t.Helper()
	p.Do("Emulation.setDeviceMetricsOverride", Object{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600})
}

// Eval evaluates an expression of JavaScript, and waits for a promise.
func (p *Tab) Eval(expression string, result any) error {
	var answer struct {
		Result           struct{ Value json.RawMessage }
		ExceptionDetails *struct {
			Exception struct{ Description string }
		}
	}
	err := p.call(p.session, "Runtime.evaluate", Object{"expression": expression, "returnByValue": true, "awaitPromise": true}, &answer)
	switch {
	case err != nil:
		return err
	case answer.ExceptionDetails != nil:
		return fmt.Errorf("%s: %s", expression, answer.ExceptionDetails.Exception.Description)
	case len(answer.Result.Value) == 0:
		return nil
	}
	return json.Unmarshal(answer.Result.Value, result)
}

// Press presses a key.
func (p *Tab) Press(key string, code int) {
	p.t.Helper()
	down := Object{"type": "keyDown", "key": key, "windowsVirtualKeyCode": code}
	if len(key) == 1 {
		down["text"] = key
	}
	p.Do("Input.dispatchKeyEvent", down)
	p.Do("Input.dispatchKeyEvent", Object{"type": "keyUp", "key": key, "windowsVirtualKeyCode": code})
}

// Wants waits until an expression is true.
func (p *Tab) Wants(expression string) {
	p.t.Helper()
	testkit.Eventually(p.t, 60*time.Second, expression, func() error {
		var is bool
		if err := p.Eval("Boolean("+expression+")", &is); err != nil {
			return err
		}
		if !is {
			var shown string
			_ = p.Eval("document.body.innerText", &shown)
			return fmt.Errorf("the page has %.3000s, and complains %q", shown, p.complaints())
		}
		return nil
	})
}

// Text is that of the elements that a selector finds, a line for each.
func (p *Tab) Text(selector string) string {
	p.t.Helper()
	var text string
	testkit.Check(p.t, p.Eval(fmt.Sprintf("[...document.querySelectorAll(%q)].map(e => e.innerText.replace(/\\s+/g, ' ').trim()).join('\\n')", selector), &text))
	return text
}

// Silent fails the test if the page has complained: of an exception, of what it couldn't load, of what its policy forbids, or by the console; or if it shows values that
// only programs have.
func (p *Tab) Silent() {
	p.t.Helper()
	for line := range strings.Lines(p.Text("body")) {
		for _, word := range []string{"NaN", "undefined", "null", "[object", "Invalid Date"} {
			if strings.Contains(line, word) {
				p.t.Errorf("the page shows %q", line)
			}
		}
	}
	if said := p.complaints(); len(said) > 0 {
		p.t.Errorf("the page complains: %s", strings.Join(said, "\n"))
	}
}

func (p *Tab) complaints() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.said[p.session])
}

// Fits fails the test if the page is wider than its window.
func (p *Tab) Fits(width int) {
	p.t.Helper()
	var is int
	testkit.Check(p.t, p.Eval("document.documentElement.scrollWidth", &is))
	if is > width {
		p.t.Errorf("in a window of %d pixels the page has %d", width, is)
	}
}

// Picture writes a PNG of the page from the top to a height.
func (p *Tab) Picture(file string, width, height int) {
	p.t.Helper()
	p.Size(width, height)
	// Twice: the page draws in the next frame what depends on its size.
	testkit.Check(p.t, p.Eval("new Promise(f => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(f, 300))))", nil))
	var answer struct{ Data string }
	testkit.Check(p.t, p.call(p.session, "Page.captureScreenshot", Object{"format": "png", "optimizeForSpeed": false}, &answer))
	testkit.Check(p.t, os.WriteFile(file, fewColours(p.t, testkit.Must(base64.StdEncoding.DecodeString(answer.Data))(p.t)), 0o644))
}

// fewColours makes a PNG one with a palette of at most 256 colours, which is half as large.
func fewColours(t *testing.T, text []byte) []byte {
	t.Helper()
	from := testkit.Must(png.Decode(bytes.NewReader(text)))(t)
	near := func(c color.Color) [3]uint32 { // alike for colours that people don't tell apart
		r, g, b, _ := c.RGBA()
		return [3]uint32{r >> 11, g >> 11, b >> 11}
	}
	counts, groups := map[color.Color]int{}, map[[3]uint32]int{}
	each := func(do func(x, y int, c color.Color)) {
		for y := range from.Bounds().Dy() {
			for x := range from.Bounds().Dx() {
				do(x, y, from.At(x, y))
			}
		}
	}
	each(func(_, _ int, c color.Color) {
		counts[c]++
		groups[near(c)]++
	})
	shown := map[[3]uint32]color.Color{} // of each group the colour that it has most of
	for c, n := range counts {
		if s, ok := shown[near(c)]; !ok || n > counts[s] || n == counts[s] && fmt.Sprint(c) < fmt.Sprint(s) {
			shown[near(c)] = c
		}
	}
	most := slices.SortedFunc(maps.Values(shown), func(a, b color.Color) int {
		return cmp.Or(groups[near(b)]-groups[near(a)], cmp.Compare(fmt.Sprint(a), fmt.Sprint(b)))
	})
	to := image.NewPaletted(from.Bounds(), most[:min(256, len(most))])
	index := map[color.Color]uint8{}
	for c := range counts {
		index[c] = uint8(to.Palette.Index(shown[near(c)]))
	}
	each(func(x, y int, c color.Color) { to.SetColorIndex(x, y, index[c]) })
	var b bytes.Buffer
	testkit.Check(t, (&png.Encoder{CompressionLevel: png.BestCompression}).Encode(&b, to))
	return b.Bytes()
}
