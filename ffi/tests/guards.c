/* What ends a guard, a wait and a client, and who is told. */
#define _GNU_SOURCE
#include "check.h"

#include <sys/wait.h>
#include <unistd.h>

syncguard_client *client;
PGconn *sql;
const char *test_url, *test_schema;

/* What a callback saw, and when it may go on. */
struct seen {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    int calls, may_return, returned;
    char reason[100];
    syncguard_guard *frees;
    syncguard_client *closes;
};

#define SEEN {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 1, 0, "", NULL, NULL}

static void on_lost(const char *reason, void *user) {
    struct seen *seen = user;
    /* The reason is gone by then. */
    if (seen->frees) syncguard_guard_free(seen->frees);
    if (seen->closes) {
        /* All is let go but this very thread. */
        ANSWERS(syncguard_client_close(seen->closes, LIMIT_MS), SYNCGUARD_NETWORK_TIMEOUT);
        EXPECT(strstr(syncguard_last_error(), "callback"));
    }
    pthread_mutex_lock(&seen->mutex);
    seen->calls++;
    snprintf(seen->reason, sizeof seen->reason, "%s", reason);
    pthread_cond_broadcast(&seen->changed);
    while (!seen->may_return) pthread_cond_wait(&seen->changed, &seen->mutex);
    seen->returned = 1;
    pthread_cond_broadcast(&seen->changed);
    pthread_mutex_unlock(&seen->mutex);
}

static void wait_for_call(struct seen *seen) {
    pthread_mutex_lock(&seen->mutex);
    while (!seen->calls) pthread_cond_wait(&seen->changed, &seen->mutex);
    pthread_mutex_unlock(&seen->mutex);
}

static syncguard_guard *lock(const char *key, uint64_t ttl_ms) {
    syncguard_guard *guard;
    ANSWERS(syncguard_lock(client, key, ttl_ms, 0, &guard), SYNCGUARD_OK);
    return guard;
}

static void lost(void) {
    struct seen first = SEEN, second = SEEN, third = SEEN;
    syncguard_guard *guard = lock("k", 6000);
    ANSWERS(syncguard_guard_on_lost(guard, on_lost, &first), SYNCGUARD_OK);
    ANSWERS(syncguard_guard_on_lost(guard, on_lost, &second), SYNCGUARD_OK);
    RUN("DELETE FROM syncguard_locks");
    ANSWERS(syncguard_guard_wait_lost(guard, SYNCGUARD_FOREVER), SYNCGUARD_NOT_HELD);
    wait_for_call(&second);
    EXPECT(strcmp(second.reason, "the lease's row is gone") == 0);
    ANSWERS(syncguard_guard_on_lost(guard, on_lost, &third), SYNCGUARD_NOT_HELD);
    EXPECT(third.calls == 1 && strcmp(third.reason, second.reason) == 0);
    ANSWERS(syncguard_guard_on_lost(guard, NULL, NULL), SYNCGUARD_NOT_HELD);
    ANSWERS(syncguard_guard_extend(guard, 1000), SYNCGUARD_NOT_HELD);
    ANSWERS(syncguard_guard_release(guard), SYNCGUARD_NOT_HELD);
    ANSWERS(syncguard_guard_on_lost(guard, on_lost, &third), SYNCGUARD_NOT_HELD);
    syncguard_guard_free(guard);
    EXPECT(first.calls == 0 && second.calls == 1 && third.calls == 1);
}

static void several_lost(void) {
    const char *keys[] = {"a", "b"};
    struct seen seen = SEEN;
    syncguard_guard *guard;
    syncguard_options options = {0};
    options.ttl_ms = 6000;
    ANSWERS(syncguard_lock_all(client, keys, 2, &options, &guard), SYNCGUARD_OK);
    ANSWERS(syncguard_guard_on_lost(guard, on_lost, &seen), SYNCGUARD_OK);
    RUN("DELETE FROM syncguard_locks WHERE key = 'b'");
    ANSWERS(syncguard_guard_wait_lost(guard, LIMIT_MS), SYNCGUARD_NOT_HELD);
    wait_for_call(&seen);
    syncguard_guard_free(guard);
    EXPECT(seen.calls == 1);
}

static void released_is_not_lost(void) {
    struct seen seen = SEEN;
    syncguard_guard *guard = lock("k", 0);
    ANSWERS(syncguard_guard_on_lost(guard, on_lost, &seen), SYNCGUARD_OK);
    ANSWERS(syncguard_guard_release(guard), SYNCGUARD_OK);
    ANSWERS(syncguard_guard_wait_lost(guard, SYNCGUARD_FOREVER), SYNCGUARD_NOT_HELD);
    syncguard_guard_free(guard);
    guard = lock("k", 0);
    ANSWERS(syncguard_guard_on_lost(guard, on_lost, &seen), SYNCGUARD_OK);
    syncguard_guard_free(guard);
    EXPECT(seen.calls == 0);
}

static void *waits_for_loss(void *guard) {
    ANSWERS(syncguard_guard_wait_lost(guard, SYNCGUARD_FOREVER), SYNCGUARD_NOT_HELD);
    return NULL;
}

static void release_ends_waits(void) {
    syncguard_guard *guard = lock("k", 0);
    pthread_t threads[3];
    for (int n = 0; n < 3; n++) EXPECT(pthread_create(&threads[n], NULL, waits_for_loss, guard) == 0);
    ANSWERS(syncguard_guard_wait_lost(guard, 20), SYNCGUARD_OK);
    ANSWERS(syncguard_guard_release(guard), SYNCGUARD_OK);
    for (int n = 0; n < 3; n++) pthread_join(threads[n], NULL);
    syncguard_guard_free(guard);
}

static void *releases(void *guard) {
    ANSWERS(syncguard_guard_release(guard), SYNCGUARD_NOT_HELD);
    return NULL;
}

static void release_waits_for_the_callback(void) {
    struct seen seen = SEEN;
    seen.may_return = 0;
    syncguard_guard *guard = lock("k", 6000);
    ANSWERS(syncguard_guard_on_lost(guard, on_lost, &seen), SYNCGUARD_OK);
    RUN("DELETE FROM syncguard_locks");
    wait_for_call(&seen);
    pthread_t thread;
    EXPECT(pthread_create(&thread, NULL, releases, guard) == 0);
    /* The release has begun: it ends the guard before it waits. */
    char *check = NULL;
    WAIT_UNTIL((syncguard_text_free(check), syncguard_guard_fence_sql(guard, &check)) == SYNCGUARD_NOT_HELD);
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    now.tv_nsec += 50 * 1000000;
    if (now.tv_nsec >= 1000000000) now.tv_sec++, now.tv_nsec -= 1000000000;
    EXPECT(pthread_timedjoin_np(thread, NULL, &now) != 0);
    pthread_mutex_lock(&seen.mutex);
    EXPECT(!seen.returned);
    seen.may_return = 1;
    pthread_cond_broadcast(&seen.changed);
    pthread_mutex_unlock(&seen.mutex);
    pthread_join(thread, NULL);
    EXPECT(seen.returned);
    syncguard_guard_free(guard);
}

static void callback_frees_its_guard_and_closes_the_client(void) {
    struct seen seen = SEEN;
    syncguard_guard *guard = lock("k", 6000);
    seen.frees = guard;
    seen.closes = client;
    ANSWERS(syncguard_guard_on_lost(guard, on_lost, &seen), SYNCGUARD_OK);
    RUN("DELETE FROM syncguard_locks");
    wait_for_call(&seen);
    EXPECT(seen.calls == 1);
    ANSWERS(syncguard_try_lock(client, "k", 0, &guard), SYNCGUARD_ABORTED);
}

static void max_hold(void) {
    struct seen seen = SEEN;
    syncguard_guard *guard;
    syncguard_options options = {0};
    /* Long enough that the callback is there before the end. */
    options.max_hold_ms = 3000;
    ANSWERS(syncguard_lock_with(client, "k", &options, &guard), SYNCGUARD_OK);
    ANSWERS(syncguard_guard_on_lost(guard, on_lost, &seen), SYNCGUARD_OK);
    ANSWERS(syncguard_guard_wait_lost(guard, LIMIT_MS), SYNCGUARD_NOT_HELD);
    wait_for_call(&seen);
    EXPECT(strstr(seen.reason, "max_hold_ms"));
    syncguard_guard_free(guard);
}

static void min_hold(void) {
    syncguard_guard *guard, *other;
    syncguard_options options = {0};
    options.min_hold_ms = LIMIT_MS;
    ANSWERS(syncguard_try_lock_with(client, "a", &options, &guard), SYNCGUARD_OK);
    ANSWERS(syncguard_guard_release(guard), SYNCGUARD_OK);
    syncguard_guard_free(guard);
    ANSWERS(syncguard_try_lock(client, "a", 0, &other), SYNCGUARD_LOCKED);
    ANSWERS(syncguard_try_lock_with(client, "b", &options, &guard), SYNCGUARD_OK);
    ANSWERS(syncguard_guard_release_now(guard), SYNCGUARD_OK);
    ANSWERS(syncguard_guard_release_now(guard), SYNCGUARD_NOT_HELD);
    syncguard_guard_free(guard);
    ANSWERS(syncguard_try_lock(client, "b", 0, &other), SYNCGUARD_OK);
    syncguard_guard_free(other);
    /* Its worker does not wait for the end of min_hold. */
    ANSWERS(syncguard_client_close(client, LIMIT_MS), SYNCGUARD_OK);
}

static void *waits_with_token(void *token) {
    syncguard_guard *guard;
    syncguard_options options = {0};
    options.token = token;
    options.timeout_ms = SYNCGUARD_FOREVER;
    ANSWERS(syncguard_lock_with(client, "token in c", &options, &guard), SYNCGUARD_ABORTED);
    EXPECT(guard == NULL);
    return NULL;
}

static void token_ends_waits(void) {
    syncguard_guard *guard = lock("token in c", 0);
    syncguard_token *token;
    pthread_t threads[2];
    ANSWERS(syncguard_token_new(&token), SYNCGUARD_OK);
    for (int n = 0; n < 2; n++) EXPECT(pthread_create(&threads[n], NULL, waits_with_token, token) == 0);
    WAIT_FOR_WAITER("token in c");
    ANSWERS(syncguard_token_cancel(token), SYNCGUARD_OK);
    for (int n = 0; n < 2; n++) pthread_join(threads[n], NULL);
    waits_with_token(token);
    EXPECT(syncguard_guard_is_held(guard));
    syncguard_token_free(token);

    syncguard_token *parent, *other;
    ANSWERS(syncguard_token_new(&parent), SYNCGUARD_OK);
    ANSWERS(syncguard_token_child(parent, &token), SYNCGUARD_OK);
    ANSWERS(syncguard_token_child(parent, &other), SYNCGUARD_OK);
    ANSWERS(syncguard_token_cancel(other), SYNCGUARD_OK);
    EXPECT(!syncguard_token_is_cancelled(parent) && !syncguard_token_is_cancelled(token));
    ANSWERS(syncguard_token_cancel(parent), SYNCGUARD_OK);
    syncguard_token_free(parent);
    waits_with_token(token);
    syncguard_token_free(token);
    syncguard_token_free(other);
    syncguard_guard_free(guard);
}

static int32_t answers_closed(const syncguard_run *run, void *user) {
    (void)user;
    ANSWERS(syncguard_client_close(client, 5000), SYNCGUARD_OK);
    EXPECT(!syncguard_run_is_held(run));
    ANSWERS(syncguard_run_wait_lost(run, SYNCGUARD_FOREVER), SYNCGUARD_NOT_HELD);
    return 0;
}

static void closed(void) {
    struct seen seen = SEEN;
    syncguard_guard *guard = lock("k", 0), *other;
    ANSWERS(syncguard_guard_on_lost(guard, on_lost, &seen), SYNCGUARD_OK);
    ANSWERS(syncguard_run_once(client, "j", SYNCGUARD_NUMBER, 1, NULL, answers_closed, NULL), SYNCGUARD_ABORTED);
    EXPECT(strncmp(syncguard_last_error(), "the job ran", 11) == 0);
    wait_for_call(&seen);
    EXPECT(strcmp(seen.reason, "the client was closed") == 0 && number("SELECT count(*) FROM syncguard_locks") == 0);
    EXPECT(!syncguard_guard_is_held(guard) && syncguard_guard_remaining_ms(guard) == 0);
    ANSWERS(syncguard_guard_wait_lost(guard, SYNCGUARD_FOREVER), SYNCGUARD_NOT_HELD);
    ANSWERS(syncguard_guard_extend(guard, 1000), SYNCGUARD_NOT_HELD);
    ANSWERS(syncguard_guard_release(guard), SYNCGUARD_NOT_HELD);
    syncguard_guard_free(guard);
    const char *keys[] = {"a", "b"};
    ANSWERS(syncguard_lock(client, "k", 0, 0, &other), SYNCGUARD_ABORTED);
    ANSWERS(syncguard_try_lock(client, "k", 0, &other), SYNCGUARD_ABORTED);
    ANSWERS(syncguard_lock_all(client, keys, 2, NULL, &other), SYNCGUARD_ABORTED);
    ANSWERS(syncguard_acquire_permit(client, "p", 1, NULL, &other), SYNCGUARD_ABORTED);
    ANSWERS(syncguard_elect(client, "e", NULL, (syncguard_lead)abort, NULL), SYNCGUARD_ABORTED);
    ANSWERS(syncguard_run_once(client, "j", SYNCGUARD_NUMBER, 1, NULL, (syncguard_job)abort, NULL), SYNCGUARD_ABORTED);
    ANSWERS(syncguard_client_close(client, 5000), SYNCGUARD_OK);
}

static void forked(void) {
    struct seen seen = SEEN;
    syncguard_guard *guard = lock("k", 0), *other;
    ANSWERS(syncguard_guard_on_lost(guard, on_lost, &seen), SYNCGUARD_OK);
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        char *check;
        EXPECT(!syncguard_guard_is_held(guard) && syncguard_guard_remaining_ms(guard) == 0);
        REFUSED(syncguard_try_lock(client, "other", 0, &other), "fork");
        REFUSED(syncguard_guard_extend(guard, 1000), "fork");
        REFUSED(syncguard_guard_fence_sql(guard, &check), "fork");
        REFUSED(syncguard_guard_on_lost(guard, on_lost, &seen), "fork");
        REFUSED(syncguard_client_close(client, 1000), "fork");
        ANSWERS(syncguard_guard_wait_lost(guard, SYNCGUARD_FOREVER), SYNCGUARD_NOT_HELD);
        REFUSED(syncguard_guard_release(guard), "fork");
        syncguard_guard_free(guard);
        syncguard_client_free(client);
        _exit(0);
    }
    int status = 1;
    EXPECT(waitpid(child, &status, 0) == child && status == 0);
    EXPECT(syncguard_guard_is_held(guard) && number("SELECT count(*) FROM syncguard_locks") == 1);
    ANSWERS(syncguard_guard_extend(guard, 30000), SYNCGUARD_OK);
    syncguard_guard_free(guard);
    EXPECT(seen.calls == 0);
}

static int balance;

static void *counts(void *unused) {
    for (int round = 0; round < 25; round++) {
        syncguard_guard *guard;
        ANSWERS(syncguard_lock(client, "k", 0, SYNCGUARD_FOREVER, &guard), SYNCGUARD_OK);
        int before = balance;
        sched_yield();
        balance = before + 1;
        syncguard_guard_free(guard);
        EXPECT(strcmp(syncguard_last_error(), "") == 0);
    }
    return unused;
}

static void threads(void) {
    pthread_t threads[8];
    for (int n = 0; n < 8; n++) EXPECT(pthread_create(&threads[n], NULL, counts, NULL) == 0);
    for (int n = 0; n < 8; n++) pthread_join(threads[n], NULL);
    EXPECT(balance == 200);
}

static void *ends_it(void *guard) {
    int32_t said = syncguard_guard_release(guard);
    EXPECT(said == SYNCGUARD_OK || said == SYNCGUARD_NOT_HELD);
    syncguard_guard_extend(guard, 1000);
    syncguard_guard_on_lost(guard, NULL, NULL);
    return (void *)(intptr_t)(said == SYNCGUARD_OK);
}

static void one_of_many_releases(void) {
    for (int round = 0; round < 20; round++) {
        syncguard_guard *guard = lock("k", 0);
        pthread_t threads[4];
        void *released;
        intptr_t all = 0;
        for (int n = 0; n < 4; n++) EXPECT(pthread_create(&threads[n], NULL, ends_it, guard) == 0);
        for (int n = 0; n < 4; n++) {
            pthread_join(threads[n], &released);
            all += (intptr_t)released;
        }
        EXPECT(all == 1 && number("SELECT count(*) FROM syncguard_locks") == 0);
        syncguard_guard_free(guard);
    }
}

static void *fails(void *unused) {
    ANSWERS(syncguard_client_close(NULL, 0), SYNCGUARD_INVALID_ARGUMENT);
    return unused;
}

static void errors(void) {
    EXPECT(strcmp(syncguard_last_error(), "") == 0 && strcmp(syncguard_last_error_sqlstate(), "") == 0);
    pthread_t thread;
    EXPECT(pthread_create(&thread, NULL, fails, NULL) == 0);
    pthread_join(thread, NULL);
    EXPECT(strcmp(syncguard_last_error(), "") == 0);
    RUN("DROP TABLE syncguard_locks");
    syncguard_guard *guard;
    EXPECT(syncguard_try_lock(client, "secret-key", 0, &guard) < 0 && guard == NULL);
    EXPECT(strcmp(syncguard_last_error_sqlstate(), "42P01") == 0 && syncguard_last_error_may_be_held_ms() == 0);
    EXPECT(strstr(syncguard_last_error(), "existing_tables_only") && !strstr(syncguard_last_error(), "secret"));
}

int main(int count, char **arguments) {
    const struct test tests[] = {
        CASE(lost), CASE(several_lost), CASE(released_is_not_lost), CASE(release_ends_waits),
        CASE(release_waits_for_the_callback), CASE(callback_frees_its_guard_and_closes_the_client), CASE(max_hold),
        CASE(min_hold), CASE(token_ends_waits), CASE(closed), CASE(forked), CASE(threads),
        CASE(one_of_many_releases), CASE(errors), {NULL, NULL}};
    return run_case(count, arguments, tests);
}
