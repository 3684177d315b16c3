package addressmap

import (
	"fmt"
	"html"
	"math"
	"strings"
)

// Cells of a row, in text and in SVG.
const rowCells = 64

// bars are cells by how many of their addresses are in use.
var bars = []rune("▁▂▃▄▅▆▇█")

// Text is the map for a terminal: a row of cells for each 64 of them, with the first address. With colour it uses the sequences of ECMA-48 (SGR).
func (m Map) Text(colour bool) string {
	var b strings.Builder
	label := 0
	for _, s := range m.Subnets {
		for i := 0; i < len(s.Cells); i += rowCells {
			label = max(label, len(s.Cells[i].First.String()))
		}
	}
	for i, s := range m.Subnets {
		if i > 0 {
			b.WriteByte('\n')
		}
		fmt.Fprintln(&b, s.title(m))
		for from := 0; from < len(s.Cells); from += rowCells {
			row := s.Cells[from:min(from+rowCells, len(s.Cells))]
			fmt.Fprintf(&b, "%-*s  ", label, row[0].First)
			for _, c := range row {
				b.WriteString(c.text(m.BlockSize, colour))
			}
			b.WriteByte('\n')
		}
	}
	if len(m.Lost) > 0 {
		fmt.Fprintf(&b, "\nin no subnet of the pool: %s\n", strings.Join(m.Lost, ", "))
	}
	fmt.Fprintf(&b, "\neach cell is %s: · nobody has, %c to %c held by nodes, by addresses in use; F floating, c cooling down%s\n", m.cell(), bars[0], bars[len(bars)-1], m.excluded())
	return b.String()
}

// excluded is the legend of excluded cells, if there are any.
func (m Map) excluded() string {
	for _, s := range m.Subnets {
		for _, c := range s.Cells {
			if c.Excluded > 0 {
				return ", x excluded"
			}
		}
	}
	return ""
}

// cell says what a cell of the map is.
func (m Map) cell() string {
	if m.BlocksPerCell == 1 {
		return "a block of " + plural(m.BlockSize, "address", "addresses")
	}
	return fmt.Sprintf("%d blocks of %s", m.BlocksPerCell, plural(m.BlockSize, "address", "addresses"))
}

func plural(n int64, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprint(n, " ", many)
}

// title says what a subnet is, and how much of it somebody has.
func (s Subnet) title(m Map) string { return s.Name() + ": " + s.Says(m) }

// Name is such as "10.0.0.0/16 and fd00::/112".
func (s Subnet) Name() string {
	prefixes := make([]string, len(s.Prefixes))
	for i, p := range s.Prefixes {
		prefixes[i] = p.String()
	}
	return strings.Join(prefixes, " and ")
}

// Says is how much of the subnet somebody has.
func (s Subnet) Says(m Map) string {
	var all Cell
	for _, c := range s.Cells {
		all.Blocks += c.Blocks
		all.Held += c.Held
		all.Allocated += c.Allocated
		all.Floating += c.Floating
		all.Cooling += c.Cooling
		all.Excluded += c.Excluded
	}
	return all.counts(m.BlockSize)
}

// counts says what is in a cell.
func (c Cell) counts(blockSize int64) string {
	text := fmt.Sprintf("%d of %s held", c.Held, plural(c.Blocks, "block", "blocks"))
	if c.Held > 0 {
		text += fmt.Sprintf(", %d of their %s in use", c.Allocated, plural(c.Held*blockSize, "address", "addresses"))
	}
	if c.Floating > 0 {
		text += fmt.Sprintf(", %d floating", c.Floating)
	}
	if c.Cooling > 0 {
		text += fmt.Sprintf(", %d cooling down", c.Cooling)
	}
	if c.Excluded > 0 {
		text += fmt.Sprintf(", %d excluded", c.Excluded)
	}
	return text
}

// text is the cell as one character.
func (c Cell) text(blockSize int64, colour bool) string {
	char, sgr := "·", "2" // faint
	switch {
	case c.Held > 0:
		char, sgr = string(bars[c.step(blockSize)]), "32" // green
		if c.Held == c.Blocks && c.Allocated == c.Held*blockSize {
			sgr = "31" // red: there is no room
		}
	case c.Floating > 0:
		char, sgr = "F", "36"
	case c.Cooling > 0:
		char, sgr = "c", "33"
	case c.Excluded == c.Blocks:
		char = "x"
	}
	if !colour {
		return char
	}
	return "\x1b[" + sgr + "m" + char + "\x1b[0m"
}

// step is the index of the bar for a cell with held blocks: the last one if all addresses of the cell are in use.
func (c Cell) step(blockSize int64) int {
	part := float64(c.Allocated) / float64(c.Blocks*blockSize)
	return int(math.Min(part*float64(len(bars)), float64(len(bars)-1)))
}

// Sizes of the SVG, in pixels.
const (
	cellSize = 10
	cellStep = 12
	margin   = 16
	labels   = 150
	line     = 18
)

// SVG is the map as a picture. Each cell tells, as its title, its addresses, what is in it, and the holders.
func (m Map) SVG() string {
	var b strings.Builder
	y := margin + line
	text := func(x, y int, weight, s string) {
		fmt.Fprintf(&b, "<text x=\"%d\" y=\"%d\" font-weight=\"%s\">%s</text>\n", x, y, weight, html.EscapeString(s))
	}
	text(margin, y-4, "bold", "AddressPool "+m.Pool+": each cell is "+m.cell())
	for _, s := range m.Subnets {
		y += line
		text(margin, y, "normal", s.title(m))
		y += line / 2
		for from := 0; from < len(s.Cells); from += rowCells {
			row := s.Cells[from:min(from+rowCells, len(s.Cells))]
			text(margin, y+cellSize-1, "normal", row[0].First.String())
			for i, c := range row {
				fmt.Fprintf(&b, "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" fill=\"%s\"><title>%s</title></rect>\n",
					margin+labels+i*cellStep, y, cellSize, cellSize, c.fill(m.BlockSize), html.EscapeString(c.tells(m.BlockSize)))
			}
			y += cellStep
		}
	}
	if len(m.Lost) > 0 {
		y += line
		text(margin, y, "normal", "in no subnet of the pool: "+strings.Join(m.Lost, ", "))
	}
	width, height := margin+labels+rowCells*cellStep+margin, y+margin
	return fmt.Sprintf("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" viewBox=\"0 0 %[1]d %[2]d\" font-family=\"sans-serif\" font-size=\"11\">\n"+
		"<rect width=\"100%%\" height=\"100%%\" fill=\"#ffffff\"/>\n%s</svg>\n", width, height, b.String())
}

// fills are the colours of cells by how many of their addresses are in use, from light to dark.
var fills = []string{"#c6dbef", "#9ecae1", "#6baed6", "#4292c6", "#2171b5", "#08519c", "#08306b", "#041c40"}

// fill is the colour of a cell.
func (c Cell) fill(blockSize int64) string {
	switch {
	case c.Held > 0:
		return fills[c.step(blockSize)]
	case c.Floating > 0:
		return "#f28e2b"
	case c.Cooling > 0:
		return "#bab0ac"
	case c.Excluded == c.Blocks:
		return "#7f7f7f"
	}
	return "#eeeeee"
}

// tells is all that is known of a cell.
func (c Cell) tells(blockSize int64) string {
	text := c.First.String()
	if c.Last != c.First {
		text += " to " + c.Last.String()
	}
	text += ": " + c.counts(blockSize)
	if len(c.Holders) > 0 {
		text += "; " + strings.Join(c.Holders, ", ")
	}
	if c.More > 0 {
		text += fmt.Sprintf(" and %d more", c.More)
	}
	return text
}
