package plan

import (
	"fmt"
	"strings"
)

// maxNamed is how many objects a message names before it only counts.
const maxNamed = 3

// Enumerate names the first few and counts the rest.
func Enumerate(names []string) string {
	if len(names) <= maxNamed {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:maxNamed], ", "), len(names)-maxNamed)
}

// Count is the number n with its noun and verb.
func Count(n int, singular, plural string) string {
	if n == 1 {
		return "1 " + singular
	}
	return fmt.Sprintf("%d %s", n, plural)
}

// maxMessage is how long a message of a condition may be, in bytes (metav1.Condition).
const maxMessage = 32768

// Fits says whether the API server accepts a message of a condition.
func Fits(text string) bool { return len(text) <= maxMessage }

// Message returns a message for a condition, of one line, that the API server accepts.
func Message(text string) string {
	text = strings.ReplaceAll(text, "\n", "; ")
	if len(text) > maxMessage {
		text = strings.ToValidUTF8(text[:maxMessage], "")
	}
	return text
}
