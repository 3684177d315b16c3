package coilv1

import (
	"errors"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
)

// checkPoolName refuses names that no AddressPool can have: blocks have the name as the value of a label.
func checkPoolName(name string) error {
	if problems := validation.IsDNS1123Subdomain(name); len(problems) > 0 || len(name) > validation.LabelValueMaxLength {
		return fmt.Errorf("no AddressPool can have the name %q: it has to be a DNS subdomain of at most %d characters", name, validation.LabelValueMaxLength)
	}
	return nil
}

// isName reports whether a namespace, a pod or a node may have the name.
func isName(name string) bool { return len(validation.IsDNS1123Subdomain(name)) == 0 }

// Objects returns an AddressPool for each pool of v1, with the same subnets and blocks, and a reserved AddressBlock for
// each block that has an address in use: its node exports it, and nobody gets another address of it.
func (s State) Objects() ([]*v2.AddressPool, []*v2.AddressBlock, error) {
	var pools []*v2.AddressPool
	byName := map[string]Pool{}
	for _, p := range s.Pools {
		byName[p.Name] = p
		pools = append(pools, p.object())
	}
	var blocks []*v2.AddressBlock
	var errs []error
	for _, b := range s.Blocks {
		o, err := b.object(byName[b.Pool])
		if err != nil {
			errs = append(errs, err)
			continue
		}
		blocks = append(blocks, o)
	}
	return pools, blocks, errors.Join(errs...)
}

func (p Pool) object() *v2.AddressPool {
	o := &v2.AddressPool{
		TypeMeta:   metav1.TypeMeta{APIVersion: v2.GroupVersion.String(), Kind: "AddressPool"},
		ObjectMeta: metav1.ObjectMeta{Name: p.Name},
		Spec:       v2.AddressPoolSpec{BlockSizeBits: int32(p.BlockSizeBits)},
	}
	for _, s := range p.Subnets {
		o.Spec.Subnets = append(o.Spec.Subnets, v2.SubnetSet{IPv4: new(s.String())})
	}
	return o
}

func (b Block) object(p Pool) (*v2.AddressBlock, error) {
	carved, err := p.carve()
	if err != nil {
		return nil, fmt.Errorf("pool %s: %w", p.Name, err)
	}
	index, ok := carved.Index(ipam.Block{IPv4: b.Prefix})
	if !ok {
		return nil, fmt.Errorf("block %s isn't one of pool %s", b.Prefix, p.Name)
	}
	if len(b.Node) > validation.LabelValueMaxLength {
		return nil, fmt.Errorf("block %s: the name of its node %s has more than %d characters", b.Prefix, b.Node, validation.LabelValueMaxLength)
	}
	return &v2.AddressBlock{
		TypeMeta: metav1.TypeMeta{APIVersion: v2.GroupVersion.String(), Kind: "AddressBlock"},
		ObjectMeta: metav1.ObjectMeta{
			Name:       fmt.Sprintf("%s-%d", p.Name, index),
			Labels:     map[string]string{v2.LabelPool: p.Name, v2.LabelNode: b.Node, v2.LabelReserved: v2.ReservedValue},
			Finalizers: []string{v2.Finalizer},
		},
		Index: index,
		IPv4:  new(b.Prefix.String()),
	}, nil
}
