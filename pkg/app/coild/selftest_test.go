package coild

import (
	"encoding/json"
	"io"
	"os"
	"strings"
	"testing"

	plan "github.com/coil-net/coil/pkg/plan/selftest"
	"github.com/coil-net/coil/pkg/testkit"
)

// Wrong words and flags of "coild selftest" are exit code 2; a question that nobody answers is an answer.
func TestSelftestCommand(t *testing.T) {
	for _, words := range []string{"", "sing", "serve --port=0", "serve --port=70000", "serve here", "serve --name=" + strings.Repeat("a", 254), "ask", "ask --timeout=1s", "ask udp:n1:9380", "ask tcp:127.0.0.1:1 --timeout=0s"} {
		if code := Main(append([]string{selftestCommand}, strings.Fields(words)...)); code != 2 {
			t.Errorf("coild selftest %s: exit code %d", words, code)
		}
	}
	r, w, err := os.Pipe()
	testkit.Check(t, err)
	stdout := os.Stdout
	os.Stdout = w
	code := Main([]string{selftestCommand, "ask", "tcp:127.0.0.1:1", "--timeout=1s"})
	os.Stdout = stdout
	testkit.Check(t, w.Close())
	text := testkit.Must(io.ReadAll(r))(t)
	answers, err := plan.ParseAnswers(text)
	if code != 0 || err != nil || len(answers) != 1 || answers[0].Reached || answers[0].Error == "" || !json.Valid(text) {
		t.Errorf("exit code %d, %s, %v", code, text, err)
	}
	testkit.Check(t, r.Close())
}
