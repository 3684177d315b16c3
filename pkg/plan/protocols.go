package plan

import corev1 "k8s.io/api/core/v1"

// Protocols are the protocols of IP by their names in Services (IANA, Assigned Internet Protocol Numbers).
var Protocols = map[corev1.Protocol]uint8{corev1.ProtocolTCP: 6, corev1.ProtocolUDP: 17, corev1.ProtocolSCTP: 132}
