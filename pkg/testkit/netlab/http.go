package netlab

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
)

// Get returns what an HTTP server answers. Another status than 200 is an error with the answer.
func Get(ctx context.Context, client *http.Client, url string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	resp, err := client.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("get %s: %s: %s", url, resp.Status, bytes.TrimSpace(body))
	}
	return string(body), err
}
