package kube

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"
)

// Recorder writes Events, one with a count for the same thing again and again. It never
// blocks. The method is that of client-go's package events.
type Recorder interface {
	Eventf(regarding, related runtime.Object, eventType, reason, action, note string, args ...any)
}

// RunRecorder returns a recorder of Events of the named component that writes
// until ctx ends. The returned function lets nothing new begin.
func RunRecorder(ctx context.Context, core rest.Interface, component string) (Recorder, func(), error) {
	scheme, err := newScheme()
	if err != nil {
		return nil, nil, err
	}
	b := record.NewBroadcaster(record.WithContext(ctx))
	b.StartRecordingToSink(sink{ctx, core})
	return record.NewEventRecorderAdapter(b.NewRecorder(scheme, corev1.EventSource{Component: component})), b.Shutdown, nil
}

// sink writes Events; see record.EventSink.
type sink struct {
	ctx  context.Context // the interface has none
	core rest.Interface
}

func (s sink) Create(e *corev1.Event) (*corev1.Event, error) {
	return s.send(s.core.Post(), e, e)
}

func (s sink) Update(e *corev1.Event) (*corev1.Event, error) {
	return s.send(s.core.Put().Name(e.Name), e, e)
}

func (s sink) Patch(e *corev1.Event, patch []byte) (*corev1.Event, error) {
	return s.send(s.core.Patch(types.StrategicMergePatchType).Name(e.Name), e, patch)
}

// send completes a request about an Event and sends it.
func (s sink) send(r *rest.Request, e *corev1.Event, body any) (*corev1.Event, error) {
	var made corev1.Event
	err := r.Namespace(e.Namespace).Resource("events").Body(body).Do(s.ctx).Into(&made)
	return &made, err
}
