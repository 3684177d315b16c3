package inspection

import "testing"

func TestPodPath(t *testing.T) {
	for pod, want := range map[string]string{
		"shop/a": "/way/shop/a", "a": "", "": "", "/": "", "/a": "", "shop/": "", "shop/a/b": "", "shop//a": "", "shop/a?x": "", "sh#op/a": "", "shop/a%2fb": "",
	} {
		if got, err := PodPath("/way/", pod); got != want || (err == nil) != (want != "") {
			t.Errorf("%q: %q, %v; want %q", pod, got, err, want)
		}
	}
}
