package main

import (
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

// program is a program of the release.
type program struct {
	name string // by which users call it
	file string // on disk
}

// writeSBOM lists what is in the programs: Go's standard library and every module that is linked, as the Go command has
// written them into the programs. The format is CycloneDX 1.6, JSON. The document has no serial number, which would be
// random, and its time is that of the commit.
func (r release) writeSBOM(path string, programs []program) error {
	bom, err := r.sbom(programs)
	if err != nil {
		return err
	}
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	// Version 1.6 of the format, because more tools read it than newer ones.
	err = cdx.NewBOMEncoder(f, cdx.BOMFileFormatJSON).SetPretty(true).EncodeVersion(bom, cdx.SpecVersion1_6)
	return errors.Join(err, f.Close())
}

func (r release) sbom(programs []program) (*cdx.BOM, error) {
	whole := cdx.Component{
		Type: cdx.ComponentTypeApplication, Name: "coil", Version: r.version,
		Licenses: &cdx.Licenses{{License: &cdx.License{ID: "Apache-2.0"}}},
	}
	components := map[string]cdx.Component{} // by their references, as the links below
	links := map[string][]string{}
	for _, p := range programs {
		info, err := buildinfo.ReadFile(p.file)
		if err != nil {
			return nil, fmt.Errorf("what is linked into %s: %w", p.name, err)
		}
		content, err := os.ReadFile(p.file)
		if err != nil {
			return nil, err
		}
		whole.PackageURL = packageURL(info.Main.Path, r.version)
		c := cdx.Component{
			BOMRef: p.name, Type: cdx.ComponentTypeApplication, Name: p.name, Version: r.version,
			Hashes: &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: fmt.Sprintf("%x", sha256.Sum256(content))}},
		}
		components[c.BOMRef] = c
		linked := []cdx.Component{standardLibrary(info)}
		for _, m := range info.Deps {
			lib, err := library(m)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", p.name, err)
			}
			linked = append(linked, lib)
		}
		for _, lib := range linked {
			components[lib.BOMRef] = lib
			links[p.name] = append(links[p.name], lib.BOMRef)
		}
		slices.Sort(links[p.name])
	}
	whole.BOMRef = whole.PackageURL
	links[whole.BOMRef] = slices.Sorted(maps.Keys(links))

	bom := cdx.NewBOM()
	bom.Metadata = &cdx.Metadata{Timestamp: r.time.Format(time.RFC3339), Component: &whole}
	bom.Components = new([]cdx.Component)
	for _, ref := range slices.Sorted(maps.Keys(components)) {
		*bom.Components = append(*bom.Components, components[ref])
	}
	bom.Dependencies = new([]cdx.Dependency)
	for _, ref := range slices.Sorted(maps.Keys(links)) {
		*bom.Dependencies = append(*bom.Dependencies, cdx.Dependency{Ref: ref, Dependencies: new(links[ref])})
	}
	return bom, nil
}

// standardLibrary is that of the Go version which compiled a program.
func standardLibrary(info *debug.BuildInfo) cdx.Component {
	version, _, _ := strings.Cut(strings.TrimPrefix(info.GoVersion, "go"), " ") // experiments come after the space
	url := packageURL("std", version)
	return cdx.Component{BOMRef: url, Type: cdx.ComponentTypeLibrary, Name: "std", Version: version, PackageURL: url}
}

// library is a module. Its hash is that of go.sum: the SHA-256 of the list of its files with theirs (go.dev/ref/mod#go-sum-files).
func library(m *debug.Module) (cdx.Component, error) {
	if m.Replace != nil {
		m = m.Replace
	}
	sum, ok := strings.CutPrefix(m.Sum, "h1:")
	hash, err := base64.StdEncoding.DecodeString(sum)
	if !ok || err != nil {
		return cdx.Component{}, fmt.Errorf("module %s has the sum %q, not one of go.sum: a release links no folders of this machine, so remove its replacement from go.mod", m.Path, m.Sum)
	}
	url := packageURL(m.Path, m.Version)
	return cdx.Component{
		BOMRef: url, Type: cdx.ComponentTypeLibrary, Name: m.Path, Version: m.Version, PackageURL: url,
		Hashes: &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: hex.EncodeToString(hash)}},
	}, nil
}

// packageURL names a module for scanners (github.com/package-url/purl-spec, type golang).
func packageURL(path, version string) string {
	return "pkg:golang/" + strings.ToLower(path) + "@" + strings.ReplaceAll(version, "+", "%2B")
}
