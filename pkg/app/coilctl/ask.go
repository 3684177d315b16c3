package coilctl

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/streaming/pkg/httpstream"

	"github.com/coil-net/coil/pkg/plan/inspection"
)

// coildContainer is the container of coild in its pod, and coildProgram its path there.
const (
	coildContainer = "coild"
	coildProgram   = "/coild"
)

// errNoAnswer: the program said nothing.
var errNoAnswer = errors.New("coild printed no answer: it may be of a version that can't be asked")

// ask asks the coild that is in a pod about one thing.
func (t *tool) ask(ctx context.Context, coild *corev1.Pod, words ...string) (*inspection.Answer, error) {
	out := &bounded{left: inspection.Limit}
	if err := t.exec(ctx, coild, out, &bounded{left: complaintsLimit}, words...); err != nil {
		return nil, err
	}
	if out.Len() == 0 {
		return nil, errNoAnswer
	}
	return inspection.Parse(out.Bytes())
}

// record asks the coild that is in a pod for all that its record has.
func (t *tool) record(ctx context.Context, coild *corev1.Pod) (*inspection.Database, error) {
	out := &bounded{left: inspection.DatabaseLimit}
	if err := t.exec(ctx, coild, out, &bounded{left: complaintsLimit}, "record"); err != nil {
		return nil, err
	}
	if out.Len() == 0 {
		return nil, errNoAnswer
	}
	return inspection.ParseDatabase(out.Bytes())
}

// complaintsLimit is the most bytes of what a program writes on the standard error.
const complaintsLimit = 4 << 10

// exec runs "coild debug" in a pod of coild. The image has no shell, and nothing of coild listens for others than its node.
func (t *tool) exec(ctx context.Context, coild *corev1.Pod, out io.Writer, complaints *bounded, words ...string) error {
	core, err := t.core()
	if err != nil {
		return err
	}
	cfg, err := t.config()
	if err != nil {
		return err
	}
	url := core.CoreV1().RESTClient().Post().Resource("pods").Namespace(coild.Namespace).Name(coild.Name).SubResource("exec").
		VersionedParams(&corev1.PodExecOptions{
			Container: coildContainer, Command: append([]string{coildProgram, "debug"}, words...), Stdout: true, Stderr: true,
		}, scheme.ParameterCodec).URL()
	sockets, err := remotecommand.NewWebSocketExecutor(cfg, "GET", url.String())
	if err != nil {
		return err
	}
	spdy, err := remotecommand.NewSPDYExecutor(cfg, "POST", url)
	if err != nil {
		return err
	}
	// As kubectl does: a proxy may know only one of them.
	exec, err := remotecommand.NewFallbackExecutor(sockets, spdy, func(err error) bool {
		return httpstream.IsUpgradeFailure(err) || httpstream.IsHTTPSProxyError(err)
	})
	if err != nil {
		return err
	}
	if err := exec.StreamWithContext(ctx, remotecommand.StreamOptions{Stdout: out, Stderr: complaints}); err != nil {
		return fmt.Errorf("exec in pod %s/%s: %w%s", coild.Namespace, coild.Name, err, lastLine(complaints.String()))
	}
	return nil
}

// lastLine is the last line of what a program complained, for the end of an error.
func lastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	if last := lines[len(lines)-1]; last != "" {
		return ": " + last
	}
	return ""
}

// bounded takes so many bytes, and fails at the next.
type bounded struct {
	bytes.Buffer
	left int
}

// Write implements io.Writer.
func (b *bounded) Write(p []byte) (int, error) {
	if len(p) > b.left {
		return 0, io.ErrShortBuffer
	}
	b.left -= len(p)
	return b.Buffer.Write(p)
}
