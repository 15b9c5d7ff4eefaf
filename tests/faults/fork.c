/*
 * A process that forks after it has made a client: the child must be refused, and the parent must not
 * notice. fork URL SCHEMA; says "ok" at its end.
 */
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "syncguard.h"

#define CHECK(what)                                                                        \
    do {                                                                                   \
        if (!(what)) {                                                                     \
            printf("line %d: %s (%s)\n", __LINE__, #what, syncguard_last_error());         \
            fflush(stdout);                                                                \
            _exit(1);                                                                      \
        }                                                                                  \
    } while (0)

/* What a child may do with its parent's handles: everything but harm. */
static void child(syncguard_client *client, syncguard_guard *guard, int way)
{
    syncguard_guard *other = NULL;
    alarm(60);
    CHECK(syncguard_try_lock(client, "other", 0, &other) == SYNCGUARD_INVALID_ARGUMENT);
    CHECK(strstr(syncguard_last_error(), "fork") != NULL);
    CHECK(other == NULL);
    if (way > 0) {
        CHECK(syncguard_guard_extend(guard, 1000) < 0);
        CHECK(syncguard_guard_release(guard) != SYNCGUARD_OK);
    }
    if (way > 1) {
        syncguard_guard_free(guard);
        CHECK(syncguard_client_close(client, 500) != SYNCGUARD_PANIC);
        syncguard_client_free(client);
    }
    _exit(0);
}

int main(int argc, char **argv)
{
    syncguard_client *client = NULL;
    syncguard_guard *guard = NULL, *second = NULL;
    int way, status;
    alarm(120);
    CHECK(argc == 3);
    CHECK(syncguard_client_connect(argv[1], argv[2], &client) == SYNCGUARD_OK);
    CHECK(syncguard_lock(client, "held", 0, 0, &guard) == SYNCGUARD_OK);
    for (way = 0; way < 3; way++) {
        pid_t pid;
        fflush(stdout);
        pid = fork();
        CHECK(pid >= 0);
        if (pid == 0)
            child(client, guard, way);
        CHECK(waitpid(pid, &status, 0) == pid);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);

        /* The same connection, the same lease. */
        CHECK(syncguard_guard_is_held(guard) == 1);
        CHECK(syncguard_guard_extend(guard, 30000) == SYNCGUARD_OK);
        CHECK(syncguard_try_lock(client, "held", 0, &second) == SYNCGUARD_LOCKED);
        CHECK(syncguard_try_lock(client, "other", 0, &second) == SYNCGUARD_OK);
        syncguard_guard_free(second);
    }
    CHECK(syncguard_guard_release(guard) == SYNCGUARD_OK);
    syncguard_guard_free(guard);
    CHECK(syncguard_client_close(client, 5000) == SYNCGUARD_OK);
    syncguard_client_free(client);
    printf("ok\n");
    return 0;
}
