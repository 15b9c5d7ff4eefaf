/* A name server that never answers for names that end in ".example", and a list of users with nobody
 * in it: preloaded into a program. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <pwd.h>
#include <string.h>
#include <unistd.h>

typedef int lookup(const char *, const char *, const struct addrinfo *, struct addrinfo **);

int getaddrinfo(const char *name, const char *service, const struct addrinfo *hints, struct addrinfo **found)
{
    const char *end = name ? strrchr(name, '.') : NULL;
    while (end && strcmp(end, ".example") == 0)
        pause();
    return ((lookup *)dlsym(RTLD_NEXT, "getaddrinfo"))(name, service, hints, found);
}

int getpwuid_r(uid_t uid, struct passwd *into, char *buffer, size_t size, struct passwd **found)
{
    (void)uid, (void)into, (void)buffer, (void)size;
    *found = NULL;
    return 0;
}
