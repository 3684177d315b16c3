package vm

// cycles reads the processor's time-stamp counter (Intel SDM, RDTSC).
func cycles() uint64
