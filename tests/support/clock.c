/* System clocks that a test can set: preloaded into a program, it adds to the time of day what the first
 * eight bytes of a file say, in nanoseconds, and to the time since the start of the machine (CLOCK_BOOTTIME)
 * what the next eight say. The monotonic clock is left alone. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t nothing[2];
static volatile int64_t *ahead = nothing;

__attribute__((constructor)) static void begin(void)
{
    const char *name = getenv("SYNCGUARD_TEST_CLOCK");
    int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0)
        return;
    void *page = mmap(NULL, sizeof nothing, PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED)
        ahead = page;
    close(file);
}

int clock_gettime(clockid_t id, struct timespec *into)
{
    int result = (int)syscall(SYS_clock_gettime, id, into);
    int day = id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE;
    if (result == 0 && (day || id == CLOCK_BOOTTIME)) {
        const int64_t second = 1000000000;
        int64_t all = (int64_t)into->tv_sec * second + into->tv_nsec + ahead[day ? 0 : 1];
        into->tv_sec = (time_t)(all / second);
        into->tv_nsec = (long)(all % second);
    }
    return result;
}

int gettimeofday(struct timeval *into, void *zone)
{
    struct timespec now;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &now) != 0)
        return -1;
    into->tv_sec = now.tv_sec;
    into->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *into)
{
    struct timespec now;
    if (clock_gettime(CLOCK_REALTIME, &now) != 0)
        return (time_t)-1;
    if (into)
        *into = now.tv_sec;
    return now.tv_sec;
}
