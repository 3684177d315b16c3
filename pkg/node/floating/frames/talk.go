package frames

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// Address is the payload of Offer, Begin and Complete, as JSON: an address by its AddressBlock.
type Address struct {
	Block string `json:"block"`
	ID    string `json:"id"`
	// Router is the pod that is to keep the flows, as the sender knows it; empty if it doesn't say.
	Router types.UID `json:"router,omitempty"`
}

// Refusal is what the receiver says against what it gets.
type Refusal struct{ reason string }

func (r Refusal) Error() string { return "refused: " + r.reason }

// Refuse returns a Refusal.
func Refuse(format string, args ...any) error { return Refusal{fmt.Sprintf(format, args...)} }

// Answer waits for the receiver, and reads its Ready. A Refused is a Refusal.
func Answer(r io.Reader, buffer *[]byte, into any) error {
	k, payload, err := Read(r, buffer)
	switch {
	case err != nil:
		return fmt.Errorf("wait for the other node: %w", err)
	case k == Refused:
		return Refuse("%.*s", MostReason, payload)
	case k != Ready:
		return fmt.Errorf("%w: kind %d", ErrFrame, k)
	}
	if err := json.Unmarshal(payload, into); err != nil {
		return fmt.Errorf("%w: %w", ErrFrame, err)
	}
	return nil
}

// During does something with a connection until ctx ends.
func During(ctx context.Context, conn net.Conn, do func() error) error {
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	return errors.Join(do(), ctx.Err())
}
