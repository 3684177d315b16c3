package spec

import (
	"encoding/json"
	"errors"
	"fmt"

	"github.com/coil-net/coil/pkg/attachment"
)

// validAttachments are the keys of the list: the specified one, and the misspelling of
// the first text of the specification, which runtimes also send
// (https://github.com/containernetworking/cni/issues/1101).
var validAttachments = []string{"cni.dev/valid-attachments", "cni.dev/attachments"}

// ValidAttachments returns the attachments that the runtime listed for GC, in the
// order in which they were named first. An attachment that either key lists is valid. A GC without
// any list is an error of code 7 rather than an order to release everything; null and
// [] are such an order.
func ValidAttachments(conf []byte) ([]attachment.ID, error) {
	o, err := parseObject(conf)
	if err != nil {
		return nil, notJSON(err)
	}
	valid := []attachment.ID{}
	seen := map[attachment.ID]bool{}
	found := false
	for _, key := range validAttachments {
		found = found || o[key] != nil
		var list []json.RawMessage
		if o.get(key, &list) != nil {
			return nil, NewError(CodeDecodingFailure, key+" of the network configuration is not a list of attachments", "")
		}
		for _, e := range list {
			var a attachment.ID
			m, err := parseObject(e)
			if errors.Join(err, m.get("containerID", &a.ContainerID), m.get("ifname", &a.IfName)) != nil || a.ContainerID == "" || a.IfName == "" {
				return nil, NewError(CodeInvalidConfig,
					fmt.Sprintf("%s of the network configuration has an attachment without containerID or ifname", key), "")
			}
			if !seen[a] {
				seen[a] = true
				valid = append(valid, a)
			}
		}
	}
	if !found {
		return nil, NewError(CodeInvalidConfig, "network configuration has no "+validAttachments[0]+": GC would release every attachment", "")
	}
	return valid, nil
}
