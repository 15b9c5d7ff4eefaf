/* What the test programs share: usage PROGRAM URL SCHEMA CASE. tests/it/c_interface.rs runs them. */
#ifndef CHECK_H
#define CHECK_H

#include "syncguard.h"

#include <dirent.h>
#include <libpq-fe.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Longer than anything here takes on a busy machine. */
#define LIMIT_MS 60000

#define EXPECT(what) \
    do { \
        if (!(what)) { \
            fprintf(stderr, "%s:%d: %s (last error: %s)\n", __FILE__, __LINE__, #what, syncguard_last_error()); \
            exit(1); \
        } \
    } while (0)

#define ANSWERS(call, wanted) \
    do { \
        int32_t said = (call); \
        if (said != (wanted)) { \
            fprintf(stderr, "%s:%d: %s: %s (last error: %s)\n", __FILE__, __LINE__, #call, \
                    syncguard_code_name(said), syncguard_last_error()); \
            exit(1); \
        } \
    } while (0)

#define REFUSED(call, text) \
    do { \
        ANSWERS(call, SYNCGUARD_INVALID_ARGUMENT); \
        EXPECT(strstr(syncguard_last_error(), text) != NULL); \
    } while (0)

extern syncguard_client *client;
extern PGconn *sql;
extern const char *test_url, *test_schema;

/* The SQLSTATE of what this failed with, or "". */
static inline const char *state_of(const char *statement) {
    static char state[6];
    PGresult *result = PQexec(sql, statement);
    const char *failed = PQresultErrorField(result, PG_DIAG_SQLSTATE);
    snprintf(state, sizeof state, "%s", failed ? failed : "");
    PQclear(result);
    return state;
}

#define RUN(statement) EXPECT(strcmp(state_of(statement), "") == 0)

static inline int number(const char *query) {
    PGresult *result = PQexec(sql, query);
    EXPECT(PQntuples(result) == 1);
    int found = atoi(PQgetvalue(result, 0, 0));
    PQclear(result);
    return found;
}

/* What becomes of a transaction that begins with this: the SQLSTATE of the check, or "" if it was committed. */
static inline const char *transaction(const char *check) {
    static char state[6];
    RUN("BEGIN");
    snprintf(state, sizeof state, "%s", state_of(check));
    state_of("INSERT INTO effects VALUES (1)");
    PGresult *result = PQexec(sql, "COMMIT");
    EXPECT(strcmp(PQcmdStatus(result), state[0] ? "ROLLBACK" : "COMMIT") == 0);
    PQclear(result);
    return state;
}

static inline void pause_ms(long ms) {
    struct timespec pause = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&pause, NULL);
}

/* Looks until it is so. */
#define WAIT_UNTIL(what) \
    do { \
        int looks = 0; \
        while (!(what)) { \
            EXPECT(looks++ < LIMIT_MS / 5 && #what); \
            pause_ms(5); \
        } \
    } while (0)

/* Waits until somebody in another process than the server's listens for the release of this key: so he waits for it. */
#define WAIT_FOR_WAITER(key) \
    WAIT_UNTIL(number("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND classid = 1936160619 " \
                      "AND objsubid = 2 AND objid::int8 = (hashtext('" key "')::int8 & 4294967295)") > 0)

static inline int threads_of_this_process(void) {
    int found = 0;
    DIR *tasks = opendir("/proc/self/task");
    for (struct dirent *task; tasks && (task = readdir(tasks));) found += task->d_name[0] != '.';
    if (tasks) closedir(tasks);
    return found;
}

struct test {
    const char *name;
    void (*test)(void);
};

#define CASE(name) {#name, name}

/* Runs the one that is named; with a second client for libpq. */
static inline int run_case(int count, char **arguments, const struct test *tests) {
    if (count != 4) return 2;
    test_url = arguments[1];
    test_schema = arguments[2];
    ANSWERS(syncguard_client_connect(arguments[1], arguments[2], &client), SYNCGUARD_OK);
    sql = PQconnectdb(arguments[1]);
    EXPECT(PQstatus(sql) == CONNECTION_OK);
    char path[200];
    snprintf(path, sizeof path, "SET search_path = %s; SET client_min_messages = warning", arguments[2]);
    RUN(path);
    RUN("CREATE TABLE effects (n int)");
    for (; tests->name; tests++) {
        if (strcmp(tests->name, arguments[3]) == 0) {
            tests->test();
            PQfinish(sql);
            syncguard_client_free(client);
            /* What a thread has in its hands is no leak. */
            WAIT_UNTIL(threads_of_this_process() == 1);
            return 0;
        }
    }
    fprintf(stderr, "no case %s\n", arguments[3]);
    return 2;
}

#endif
