package cniplugin

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/cniconf/spec"
)

const prevResult = `{"cniVersion":"1.1.0","interfaces":[{"name":"br0"},{"name":"veth1"},{"name":"eth0","sandbox":"/ns"}],` +
	`"ips":[{"interface":2,"address":"10.1.0.1/24"},{"interface":0,"address":"192.168.0.1/24"},{"address":"fd01::1/64"},{"interface":99,"address":"10.9.9.9/32"}]}`

func TestRequest(t *testing.T) {
	const k8sArgs = "IgnoreUnknown=1;K8S_POD_NAMESPACE=ns;K8S_POD_NAME=pod;K8S_POD_INFRA_CONTAINER_ID=c;K8S_POD_UID=u=1;"
	k8s := func(chained string) map[string]string {
		return map[string]string{"IgnoreUnknown": "1", "K8S_POD_NAMESPACE": "ns", "K8S_POD_NAME": "pod",
			"K8S_POD_INFRA_CONTAINER_ID": "c", "K8S_POD_UID": "u=1", "IS_CHAINED": chained}
	}
	ips := []string{"10.1.0.1", "fd01::1", "10.9.9.9"}
	interfaces := map[string]bool{"br0": false, "veth1": false, "eth0": true}
	tests := []struct {
		name string
		v    verb
		args string
		prev string
		edit func(*command)
		want request
		code uint
		text string // part of the error's message
	}{
		{name: "ADD", v: verbAdd, args: k8sArgs, want: request{args: k8s("false")}},
		{name: "ADD in a chain", v: verbAdd, args: k8sArgs, prev: prevResult, want: request{args: k8s("true"), ips: ips, interfaces: interfaces}},
		{name: "IS_CHAINED of the runtime doesn't count", v: verbAdd, args: k8sArgs + "IS_CHAINED=true", want: request{args: k8s("false")}},
		{name: "ADD without arguments", v: verbAdd, code: 4, text: "K8S_POD_NAMESPACE is missing"},
		{name: "ADD without the name", v: verbAdd, args: "K8S_POD_NAMESPACE=ns", code: 4, text: "K8S_POD_NAME is missing"},
		{name: "ADD with an empty namespace", v: verbAdd, args: "K8S_POD_NAMESPACE=;K8S_POD_NAME=p", code: 4, text: "K8S_POD_NAMESPACE is missing"},
		{name: "ADD with a broken pair", v: verbAdd, args: k8sArgs + "broken", code: 4, text: `"broken"`},
		{name: "ADD with an unnamed value", v: verbAdd, args: k8sArgs + "=x", code: 4, text: `"=x"`},
		{name: "ADD with bytes", v: verbAdd, args: k8sArgs + "X=\xff", code: 4, text: `\xff`},
		{name: "ADD with a netns of bytes", v: verbAdd, args: k8sArgs, edit: func(c *command) { c.netns = "/\xff" }, code: 4, text: "CNI_NETNS"},
		{name: "ADD with a broken prevResult", v: verbAdd, args: k8sArgs, prev: `{"cniVersion":"9.0.0"}`, code: 6, text: "prevResult"},
		{name: "CHECK", v: verbCheck, prev: prevResult, want: request{args: map[string]string{"IS_CHAINED": "true"}, ips: ips, interfaces: interfaces}},
		{name: "CHECK without prevResult", v: verbCheck, args: k8sArgs, code: 7, text: "prevResult"},
		{name: "CHECK with a broken prevResult", v: verbCheck, prev: `1`, code: 6, text: "prevResult"},
		{name: "DEL without anything", v: verbDel, want: request{args: map[string]string{"IS_CHAINED": "false"}}},
		{name: "DEL with a broken pair", v: verbDel, args: "x;" + k8sArgs, want: request{args: k8s("false")}},
		{name: "DEL with a broken prevResult", v: verbDel, prev: `[]`, want: request{args: map[string]string{"IS_CHAINED": "true"}}},
		{name: "GC", v: verbGC, want: request{args: map[string]string{"IS_CHAINED": "false"}}},
		{name: "STATUS", v: verbStatus, want: request{args: map[string]string{"IS_CHAINED": "false"}}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			stdin := `{"cniVersion":"1.1.0","name":"n","type":"coil"}`
			if tt.prev != "" {
				stdin = strings.TrimSuffix(stdin, "}") + `,"prevResult":` + tt.prev + `}`
			}
			conf, err := spec.ParseConf([]byte(stdin))
			if err != nil {
				t.Fatal(err)
			}
			c := command{verb: tt.v, rawArgs: tt.args, conf: conf, request: request{ID: attachment.ID{ContainerID: "c", IfName: "eth0"}, netns: "/ns", path: "/p", stdinData: []byte(stdin)}}
			if tt.edit != nil {
				tt.edit(&c)
			}
			err = c.complete()
			if tt.code != 0 {
				var e *spec.Error
				if !errors.As(err, &e) || e.Code != tt.code || !strings.Contains(e.Msg, tt.text) {
					t.Fatalf("error is %v (%T), want code %d with %q", err, err, tt.code, tt.text)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			want := tt.want
			want.ID, want.netns, want.path, want.stdinData = c.ID, "/ns", "/p", []byte(stdin)
			if diff := cmp.Diff(want, c.request, cmp.AllowUnexported(request{})); diff != "" {
				t.Errorf("request (-want +got):\n%s", diff)
			}
		})
	}
}
