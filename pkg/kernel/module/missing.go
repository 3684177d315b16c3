package module

import "slices"

// Missing returns the modules that the running kernel doesn't have: those that are neither loaded nor built in, and that
// Load finds no file of. It loads nothing. dir is as in Load. If dir has no lists for this kernel, the error is
// fs.ErrNotExist, and the names are those of the modules that aren't loaded.
func Missing(dir string, names ...string) ([]string, error) {
	l, err := newLoader(dir)
	if err != nil {
		return nil, err
	}
	return l.missing(names)
}

func (l loader) missing(names []string) ([]string, error) {
	present, err := l.present()
	if err != nil {
		return nil, err
	}
	absent := slices.DeleteFunc(slices.Clone(names), func(n string) bool { return present[canonical(n)] })
	if len(absent) == 0 {
		return nil, nil
	}
	files, err := l.dependencies()
	return slices.DeleteFunc(absent, func(n string) bool { return files[canonical(n)] != nil }), err
}
