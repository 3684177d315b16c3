package dataplane

// MarkBalanced is the bit of the connection mark, on a gateway machine, of connections to Services whose source is to be translated. Other bits stay as they are.
const MarkBalanced = 0x00400000

// NftTableLB is the table of nftables, of the family inet, on gateway machines.
const NftTableLB = "coil_lb"
