package coilctl

import (
	"context"
	"os"
	"os/signal"
	"sync"
	"syscall"
)

// interrupts returns a context that ends when the command is to end: by Ctrl-C, SIGTERM, or because its terminal was closed. What the command has begun it may undo then. The next Ctrl-C or SIGTERM ends the
// process at once. Another SIGHUP doesn't: shells and the kernel send several. Under nohup there is none.
func interrupts() (ctx context.Context, stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	asked, hung, ended := make(chan os.Signal, 1), make(chan os.Signal, 1), make(chan struct{})
	signal.Notify(asked, syscall.SIGINT, syscall.SIGTERM)
	if !signal.Ignored(syscall.SIGHUP) {
		signal.Notify(hung, syscall.SIGHUP)
	}
	var work sync.WaitGroup
	work.Go(func() {
		for {
			select {
			case <-asked:
				signal.Stop(asked)
			case <-hung:
			case <-ended:
				return
			}
			cancel()
		}
	})
	return ctx, func() {
		close(ended)
		work.Wait()
		signal.Stop(asked)
		signal.Stop(hung)
		cancel()
	}
}
