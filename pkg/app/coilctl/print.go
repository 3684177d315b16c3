package coilctl

import (
	"fmt"
	"io"
	"reflect"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// own is a text that may control the terminal, since coilctl has made it, or made what others have written printable.
type own string

// printf writes text for people, and makes its arguments printable: others have written them. A program in a pod gives links any name, and whoever may write Events or objects, their messages. All output
// of coilctl that is neither JSON, YAML nor a table is written so.
func printf(w io.Writer, format string, args ...any) error {
	for i, a := range args {
		switch a := a.(type) {
		case own:
			args[i] = string(a)
		case error:
			args[i] = printable(a.Error())
		case fmt.Stringer:
			args[i] = printable(a.String())
		default:
			if v := reflect.ValueOf(a); v.Kind() == reflect.String {
				args[i] = printable(v.String())
			}
		}
	}
	_, err := fmt.Fprintf(w, format, args...)
	return err
}

// printable escapes, as Go does, what is no visible character: those that control a terminal or begin a line, those that turn the direction of what follows, and bytes that are no text.
func printable(text string) string {
	var b strings.Builder
	for rest := text; len(rest) > 0; {
		r, n := utf8.DecodeRuneInString(rest)
		switch {
		case r == utf8.RuneError && n == 1:
			fmt.Fprintf(&b, `\x%02x`, rest[0])
		case unicode.IsPrint(r):
			b.WriteRune(r)
		default:
			quoted := strconv.QuoteRune(r)
			b.WriteString(quoted[1 : len(quoted)-1])
		}
		rest = rest[n:]
	}
	return b.String()
}

// eachLine makes the lines of a text printable.
func eachLine(text string) own {
	lines := strings.Split(text, "\n")
	for i, l := range lines {
		lines[i] = printable(l)
	}
	return own(strings.Join(lines, "\n"))
}
