/* Handles that are freed where thread-locals are gone: usage URL SCHEMA HOW. tests/thread_locals.rs runs it. */
#include "syncguard.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static syncguard_client *client;
static syncguard_guard *guard;
static pthread_key_t key;

static void check(const char *what, int32_t code) {
    if (code != SYNCGUARD_OK) {
        fprintf(stderr, "%s: %s: %s\n", what, syncguard_code_name(code), syncguard_last_error());
        _Exit(1);
    }
}

static void free_both(void) {
    syncguard_guard_free(guard);
    syncguard_client_free(client);
}

static void release_and_close(void) {
    check("release", syncguard_guard_release(guard));
    check("close", syncguard_client_close(client, 5000));
    free_both();
}

static void free_guard(void *kept) { syncguard_guard_free(kept); }

static void *hold(void *unused) {
    syncguard_guard *kept;
    check("lock", syncguard_lock(client, "k", 30000, 0, &kept));
    pthread_setspecific(key, kept);
    return unused;
}

int main(int count, char **arguments) {
    if (count != 4) return 2;
    const char *how = arguments[3];
    check("connect", syncguard_client_connect(arguments[1], arguments[2], &client));
    if (strcmp(how, "key") == 0) {
        pthread_t thread;
        if (pthread_key_create(&key, free_guard) || pthread_create(&thread, NULL, hold, NULL)) return 2;
        pthread_join(thread, NULL);
        syncguard_client_free(client);
        return 0;
    }
    if (strcmp(how, "atexit") == 0) atexit(free_both);
    if (strcmp(how, "atexit-release") == 0) atexit(release_and_close);
    check("lock", syncguard_lock(client, "k", 30000, 0, &guard));
    return 0;
}
