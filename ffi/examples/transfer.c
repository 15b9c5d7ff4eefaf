/*
 * Moves money between two accounts that are kept in a file, one unit per round. Start it as often as
 * you like at the same time: the lock makes them take turns, and no transfer is lost.
 *
 *     transfer URL SCHEMA FILE ROUNDS        (the file holds two numbers, such as "100 0")
 *
 * To build it, after scripts/install-c:
 *
 *     cc transfer.c -o transfer $(pkg-config --cflags --libs syncguard)
 */
#include <stdio.h>
#include <stdlib.h>

#include "syncguard.h"

static int fail(const char *what, int32_t code)
{
    fprintf(stderr, "%s: %s: %s\n", what, syncguard_code_name(code), syncguard_last_error());
    return 1;
}

/* Reads both balances, and writes them one unit apart. */
static int move_one(const char *path, const syncguard_guard *guard)
{
    long from, to;
    FILE *file = fopen(path, "r");
    if (file == NULL || fscanf(file, "%ld %ld", &from, &to) != 2) {
        perror(path);
        if (file != NULL)
            fclose(file);
        return 1;
    }
    fclose(file);

    /* The moment before the write is the one to look. A file cannot check the fence itself; a
     * database can, and should: store it beside the data and refuse a lower one. */
    if (!syncguard_guard_is_held(guard)) {
        fprintf(stderr, "the lock was lost: nothing was written\n");
        return 1;
    }
    file = fopen(path, "w");
    if (file == NULL || fprintf(file, "%ld %ld\n", from - 1, to + 1) < 0 || fclose(file) != 0) {
        perror(path);
        return 1;
    }
    return 0;
}

int main(int argc, char **argv)
{
    if (argc != 5) {
        fprintf(stderr, "usage: transfer URL SCHEMA FILE ROUNDS\n");
        return 2;
    }
    syncguard_client *client = NULL;
    int32_t code = syncguard_client_connect(argv[1], argv[2], &client);
    if (code != SYNCGUARD_OK)
        return fail("connect", code);

    int failed = 0;
    uint64_t fence = 0;
    for (long round = atol(argv[4]); round > 0 && !failed; round--) {
        syncguard_guard *guard = NULL;
        code = syncguard_lock(client, "example:transfer", 10000, SYNCGUARD_FOREVER, &guard);
        if (code != SYNCGUARD_OK) {
            failed = fail("lock", code);
            break;
        }
        if (syncguard_guard_fence(guard) <= fence) {
            fprintf(stderr, "the fence did not rise\n");
            failed = 1;
        }
        fence = syncguard_guard_fence(guard);
        failed |= move_one(argv[3], guard);
        code = syncguard_guard_release(guard);
        if (code != SYNCGUARD_OK)
            failed = fail("release", code);
        syncguard_guard_free(guard);
    }

    code = syncguard_client_close(client, 5000);
    if (code != SYNCGUARD_OK)
        failed = fail("close", code);
    syncguard_client_free(client);
    return failed;
}
