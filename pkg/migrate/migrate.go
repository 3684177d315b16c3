// Package migrate moves a cluster from Coil v1 to this version.
//
// It owns the order of what happens to v1's objects, its data and its pods. It must not know how etcd is spoken to,
// nor what v1's data mean.
//
// Each step is safe to do again, so that a command that was killed is run again from its beginning.
package migrate

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"

	"github.com/coil-net/coil/generated/clientset/versioned"
)

// Cluster is the cluster that is moved, and where progress is told.
type Cluster struct {
	Kube kubernetes.Interface
	Coil versioned.Interface
	// Log gets a line for each step, for the person who waits.
	Log io.Writer
}

// say writes a line of progress.
func (c Cluster) say(format string, args ...any) {
	fmt.Fprintf(c.Log, time.Now().Format(time.TimeOnly)+" "+format+"\n", args...)
}

// caused puts the reason for which ctx has ended, such as a signal, before the error of a call that ended with it.
func caused(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil && !errors.Is(err, cause) {
		return fmt.Errorf("%w: %w", cause, err)
	}
	return err
}

// poll is how often the API server is asked for what is waited for.
const poll = time.Second

// until calls done again and again until it returns true or an error, or ctx ends.
func until(ctx context.Context, done wait.ConditionWithContextFunc) error {
	return wait.PollUntilContextCancel(ctx, poll, true, done)
}
