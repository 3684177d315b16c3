package kube

import (
	"context"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/events"

	coilscheme "github.com/coil-net/coil/generated/clientset/versioned/scheme"
)

// Recorder writes Events, one for the same thing again and again: an Event
// series. It never blocks.
type Recorder = events.EventRecorder

// RunRecorder returns a recorder of Events of the named component that writes
// until ctx ends. The returned function waits for the last of them.
func RunRecorder(ctx context.Context, client kubernetes.Interface, component string) (Recorder, func(), error) {
	if err := coilscheme.AddToScheme(scheme.Scheme); err != nil {
		return nil, nil, err
	}
	b := events.NewBroadcaster(&events.EventSinkImpl{Interface: client.EventsV1()})
	if err := b.StartRecordingToSinkWithContext(ctx); err != nil {
		return nil, nil, err
	}
	return b.NewRecorder(scheme.Scheme, component), b.Shutdown, nil
}
