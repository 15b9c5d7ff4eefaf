/*
 * A server's clock that can be set: preloaded into it, adds to the time as many milliseconds as the
 * file named by SYNCGUARD_CLOCK says.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long long added_ms(void)
{
    char text[32] = "";
    const char *path = getenv("SYNCGUARD_CLOCK");
    int before = errno, file = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    if (file >= 0) {
        ssize_t size = read(file, text, sizeof text - 1);
        text[size > 0 ? size : 0] = '\0';
        close(file);
    }
    errno = before;
    return atoll(text);
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (failed == 0 && clock == CLOCK_REALTIME) {
        long long ms = now->tv_nsec / 1000000 + added_ms();
        long long seconds = ms >= 0 ? ms / 1000 : -((999 - ms) / 1000);
        now->tv_sec += seconds;
        now->tv_nsec = now->tv_nsec % 1000000 + (ms - seconds * 1000) * 1000000;
    }
    return failed;
}

int gettimeofday(struct timeval *now, void *zone)
{
    struct timespec precise;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &precise) != 0)
        return -1;
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out != NULL)
        *out = now.tv_sec;
    return now.tv_sec;
}
