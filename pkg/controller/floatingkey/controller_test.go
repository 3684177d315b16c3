package floatingkey

import (
	"bytes"
	"errors"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/coil-net/coil/pkg/plan/keys"
	"github.com/coil-net/coil/pkg/testkit/fakeapi"
)

const resource = "secrets"

// scene is a controller at an API server.
type scene struct {
	*Controller
	t   *testing.T
	api *fakeapi.Server
	at  time.Time
}

func newScene(t *testing.T) *scene {
	s := &scene{t: t, api: fakeapi.New(t, nil), at: time.Unix(1e9, 0)}
	s.api.Put(resource, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: keys.Namespace, Name: keys.Name}})
	client := fake.NewSimpleClientset()
	client.PrependReactor("*", "*", func(a clienttesting.Action) (bool, runtime.Object, error) { return s.api.React(a) })
	s.Controller = New(client, nil)
	s.now = func() time.Time { return s.at }
	return s
}

func (s *scene) secret() *corev1.Secret {
	return fakeapi.Find[*corev1.Secret](s.api, resource, keys.Namespace+"/"+keys.Name)
}

// look lets the controller look, and returns the keys then.
func (s *scene) look() [][]byte {
	s.t.Helper()
	if err := s.sync(s.t.Context()); err == nil || apierrors.ReasonForError(err) != "" {
		s.t.Fatalf("it doesn't look again: %v", err)
	}
	return keys.Of(s.secret())
}

func TestKeysAreMadeAndChanged(t *testing.T) {
	s := newScene(t)
	first := s.look()
	if len(first) != 2 || bytes.Equal(first[0], first[1]) {
		t.Fatalf("%d keys, or equal ones", len(first))
	}
	version := s.secret().ResourceVersion
	s.at = s.at.Add(keys.Period - time.Second)
	if s.look(); s.secret().ResourceVersion != version {
		t.Error("they were changed too early")
	}
	s.at = s.at.Add(time.Second)
	second := s.look()
	if len(second) != 3 || !bytes.Equal(second[0], first[1]) || !bytes.Equal(second[2], first[0]) || bytes.Equal(second[1], first[1]) {
		t.Error("the next one isn't the current one now, or the current one not the previous one")
	}
}

// A Secret that isn't there isn't made, and is looked for again.
func TestSecretIsMissing(t *testing.T) {
	s := newScene(t)
	s.api.Drop(resource, keys.Namespace+"/"+keys.Name)
	if s.look(); s.secret() != nil {
		t.Error("it was made")
	}
	s.api.Put(resource, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: keys.Namespace, Name: keys.Name}})
	if len(s.look()) != 2 {
		t.Error("it has no keys")
	}
}

// A Secret that has changed since it was read stays.
func TestSecretChanges(t *testing.T) {
	s := newScene(t)
	s.api.Fault = func(verb, _ string) (before, after error) {
		if verb == "update" {
			return apierrors.NewConflict(corev1.Resource(resource), keys.Name, errors.New("it was changed")), nil
		}
		return nil, nil
	}
	if err := s.sync(t.Context()); !apierrors.IsConflict(err) || s.secret().Data != nil {
		t.Errorf("%v", err)
	}
}
