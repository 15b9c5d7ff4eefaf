/* A program that loads the library, uses it and lets it go, again and again: usage LIBRARY URL SCHEMA. */
#include "syncguard.h"

#include <dirent.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static int threads(void) {
    int found = 0;
    DIR *tasks = opendir("/proc/self/task");
    for (struct dirent *task; tasks && (task = readdir(tasks));) found += task->d_name[0] != '.';
    if (tasks) closedir(tasks);
    return found;
}

static char **arguments;
static void *library;

/* On a thread of its own: thread-locals of a thread that lives would keep the library. */
static void *use(void *unused) {
    int32_t (*connect)(const char *, const char *, syncguard_client **);
    int32_t (*lock)(const syncguard_client *, const char *, uint64_t, uint64_t, syncguard_guard **);
    void (*free_guard)(syncguard_guard *), (*free_client)(syncguard_client *);
    *(void **)&connect = dlsym(library, "syncguard_client_connect");
    *(void **)&lock = dlsym(library, "syncguard_lock");
    *(void **)&free_guard = dlsym(library, "syncguard_guard_free");
    *(void **)&free_client = dlsym(library, "syncguard_client_free");
    syncguard_client *client;
    syncguard_guard *guard;
    if (connect(arguments[2], arguments[3], &client) || lock(client, "k", 0, 0, &guard)) exit(1);
    free_guard(guard);
    free_client(client);
    return unused;
}

int main(int count, char **given) {
    if (count != 4) return 2;
    arguments = given;
    for (int round = 0; round < 3; round++) {
        pthread_t thread;
        library = dlopen(arguments[1], RTLD_NOW);
        if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
        if (pthread_create(&thread, NULL, use, NULL)) return 1;
        pthread_join(thread, NULL);
        dlclose(library);
    }
    /* Its threads end in code that must still be there. */
    struct timespec pause = {0, 5000000};
    for (int looks = 0; threads() > 1; looks++) {
        if (looks > 12000) return fprintf(stderr, "%d threads\n", threads()), 1;
        nanosleep(&pause, NULL);
    }
    return dlopen(arguments[1], RTLD_NOW | RTLD_NOLOAD) ? 0 : 1;
}
