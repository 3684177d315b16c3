package monitoring

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coil-net/coil/integration/browser"
	"github.com/coil-net/coil/integration/monitoring/draw"
	"github.com/coil-net/coil/pkg/testkit"
)

// drawPages draws each dashboard with what a Prometheus has from a time on, as Grafana does, and takes its picture. All panels are there, and show
// something unless they may show nothing.
func drawPages(t *testing.T, p server, began time.Time) {
	t.Helper()
	chromium := browser.New(t)
	for name, d := range dashboards(t) {
		var drawn draw.Drawn
		testkit.Eventually(t, time.Minute, name+" is drawn", func() (err error) {
			drawn, err = d.Draw(t.Context(), p.Prometheus, draw.Window{From: began, To: time.Now(), Step: scrapeInterval, Rate: 10 * time.Second})
			for _, title := range drawn.Empty {
				if !slices.Contains(empty[name], title) {
					err = errors.Join(err, fmt.Errorf("the panel %q shows nothing", title))
				}
			}
			return err
		})
		t.Logf("%s: panels without data are %q", name, drawn.Empty)
		page := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/html; charset=utf-8")
			_, _ = w.Write(drawn.HTML)
		}))
		tab := chromium.Open(page.URL, draw.Width)
		checkPage(t, tab, name, d, drawn)
		takePicture(t, tab, name, drawn.Height)
		tab.Close()
		page.Close()
	}
}

// checkPage looks whether the page has all panels, and each of them an image, unless there is nothing to show.
func checkPage(t *testing.T, tab *browser.Tab, name string, d draw.Dashboard, drawn draw.Drawn) {
	t.Helper()
	var titles []string
	for _, p := range d.Panels {
		if p.Type != "row" {
			titles = append(titles, p.Title)
		}
	}
	tab.Wants(fmt.Sprintf("document.querySelectorAll('section').length === %d", len(titles)))
	if got, want := tab.Text("h3"), strings.Join(titles, "\n"); got != want {
		t.Errorf("%s has the panels %q, want %q", name, got, want)
	}
	var blank string
	testkit.Check(t, tab.Eval(`[...document.querySelectorAll('section')].filter(s => !s.querySelector('path[d^=M], circle, .bar, .number')).map(s => s.querySelector('h3').innerText).join('\n')`, &blank))
	if want := strings.Join(drawn.Empty, "\n"); blank != want {
		t.Errorf("%s: panels without lines are %q, want %q", name, blank, want)
	}
	tab.Fits(draw.Width)
	tab.Silent()
}

// takePicture takes one, which is no larger than those that are kept may be.
func takePicture(t *testing.T, tab *browser.Tab, name string, height int) {
	t.Helper()
	dir := t.TempDir()
	if *update {
		dir = filepath.Join(folder, "dashboards")
	}
	file := filepath.Join(dir, name+".png")
	tab.Picture(file, draw.Width, height)
	if size := testkit.Must(os.Stat(file))(t).Size(); size > 150<<10 {
		t.Errorf("the picture of %s has %d bytes", name, size)
	}
}
