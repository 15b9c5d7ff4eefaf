/* Preloaded into one worker: a fork, for a test in safe Rust. */
#define _GNU_SOURCE
#include <unistd.h>

int nice(int more)
{
    return more == 1234567 ? fork() : -1;
}
