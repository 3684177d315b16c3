package coilctl

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/streaming/pkg/httpstream"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/inspection"
)

// coildContainer is the container of coild in its pod, and coildProgram its path there.
const (
	coildContainer = "coild"
	coildProgram   = "/coild"
)

// routerProgram is the path of coil-egress in its container.
const routerProgram = "/coil-egress"

// ask asks the coild that is in a pod about one thing.
func (t *tool) ask(ctx context.Context, coild *corev1.Pod, words ...string) (*inspection.Answer, error) {
	text, err := t.answer(ctx, coild, coildContainer, inspection.Limit, patient(ctx, debugOf(coildProgram, words)))
	if err != nil {
		return nil, err
	}
	return inspection.Parse(text)
}

// record asks the coild that is in a pod for all that its record has.
func (t *tool) record(ctx context.Context, coild *corev1.Pod) (*inspection.Database, error) {
	text, err := t.answer(ctx, coild, coildContainer, inspection.DatabaseLimit, debugOf(coildProgram, []string{"record"}))
	if err != nil {
		return nil, err
	}
	return inspection.ParseDatabase(text)
}

// askRouter asks the router that is in a pod.
func (t *tool) askRouter(ctx context.Context, router *corev1.Pod, words ...string) (*inspection.RouterAnswer, error) {
	text, err := t.answer(ctx, router, v2.EgressContainerName, inspection.Limit, patient(ctx, debugOf(routerProgram, words)))
	if err != nil {
		return nil, err
	}
	return inspection.ParseRouter(text)
}

// debugOf is the command by which a program asks the one that serves in its pod. Images have no shell, and nothing listens for others than the pod.
func debugOf(program string, words []string) []string {
	return append([]string{program, "debug"}, words...)
}

// patient has a program wait longer for the answer than it does by itself, if the caller does.
func patient(ctx context.Context, command []string) []string {
	const usual = 5 * time.Second
	at, ok := ctx.Deadline()
	if left := time.Until(at); ok && left > usual && !slices.Contains(command, "send") {
		command = append(command, fmt.Sprintf("--timeout=%s", (left-time.Second).Round(time.Second)))
	}
	return command
}

// complaintsLimit is the most bytes of what a program writes on the standard error.
const complaintsLimit = 4 << 10

// answer runs a program that prints an answer, of so many bytes at most, in a container.
func (t *tool) answer(ctx context.Context, pod *corev1.Pod, container string, limit int, command []string) ([]byte, error) {
	out := &bounded{left: limit}
	if err := t.exec(ctx, pod, container, out, &bounded{left: complaintsLimit}, command); err != nil {
		return nil, err
	}
	if out.Len() == 0 {
		return nil, fmt.Errorf("%s in pod %s/%s printed no answer: it may be of a version that can't be asked", command[0], pod.Namespace, pod.Name)
	}
	return out.Bytes(), nil
}

// execCoild runs "coild debug" in a pod of coild.
func (t *tool) execCoild(ctx context.Context, coild *corev1.Pod, out io.Writer, complaints *bounded, words ...string) error {
	return t.exec(ctx, coild, coildContainer, out, complaints, debugOf(coildProgram, words))
}

// exec runs a program in a container.
func (t *tool) exec(ctx context.Context, pod *corev1.Pod, container string, out io.Writer, complaints *bounded, command []string) error {
	core, err := t.core()
	if err != nil {
		return err
	}
	cfg, err := t.config()
	if err != nil {
		return err
	}
	url := core.CoreV1().RESTClient().Post().Resource("pods").Namespace(pod.Namespace).Name(pod.Name).SubResource("exec").
		VersionedParams(&corev1.PodExecOptions{Container: container, Command: command, Stdout: true, Stderr: true}, scheme.ParameterCodec).URL()
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
		return fmt.Errorf("exec in pod %s/%s: %w%s", pod.Namespace, pod.Name, err, lastLine(complaints.String()))
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
