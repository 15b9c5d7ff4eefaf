/* Several keys, readers, permits, elections, jobs that run once, and fenced writes. */
#include "check.h"

syncguard_client *client;
PGconn *sql;
const char *test_url, *test_schema;

static void several(void) {
    const char *keys[] = {"b", "a", "it's \xce\xa9\\"};
    syncguard_guard *guard, *other;
    ANSWERS(syncguard_lock_all(client, keys, 3, NULL, &guard), SYNCGUARD_OK);
    EXPECT(syncguard_guard_is_held(guard) && syncguard_guard_remaining_ms(guard) > 0);
    EXPECT(syncguard_guard_fence(guard) == 0 && syncguard_guard_permit(guard) == 0);
    EXPECT(syncguard_guard_fence_of(guard, "a") == 1 && syncguard_guard_fence_of(guard, keys[2]) == 1);
    /* The Ohm sign, which is an omega in Unicode's normal form. */
    EXPECT(syncguard_guard_fence_of(guard, "it's \xe2\x84\xa6\\") == 1);
    EXPECT(syncguard_guard_fence_of(guard, "c") == 0 && syncguard_guard_fence_of(guard, "\xff") == 0);
    ANSWERS(syncguard_try_lock(client, "a", 0, &other), SYNCGUARD_LOCKED);
    const char *overlapping[] = {"c", "b"};
    ANSWERS(syncguard_try_lock_all(client, overlapping, 2, NULL, &other), SYNCGUARD_LOCKED);
    EXPECT(other == NULL && number("SELECT count(*) FROM syncguard_locks") == 3);
    ANSWERS(syncguard_guard_extend(guard, 20000), SYNCGUARD_OK);

    char *check, *late;
    ANSWERS(syncguard_guard_fence_sql(guard, &check), SYNCGUARD_OK);
    EXPECT(strcmp(transaction(check), "") == 0);
    ANSWERS(syncguard_guard_release(guard), SYNCGUARD_OK);
    ANSWERS(syncguard_guard_release(guard), SYNCGUARD_NOT_HELD);
    ANSWERS(syncguard_guard_fence_sql(guard, &late), SYNCGUARD_NOT_HELD);
    EXPECT(late == NULL && strcmp(transaction(check), "22P02") == 0);
    EXPECT(number("SELECT count(*) FROM effects") == 1);
    syncguard_text_free(check);
    syncguard_guard_free(guard);

    ANSWERS(syncguard_try_lock_all(client, keys, 1, NULL, &guard), SYNCGUARD_OK);
    EXPECT(syncguard_guard_fence(guard) == 2 && syncguard_guard_fence_of(guard, "b") == 2);
    ANSWERS(syncguard_guard_release_now(guard), SYNCGUARD_OK);
    syncguard_guard_free(guard);
}

static void bad_input(void) {
    syncguard_guard *guard = (syncguard_guard *)1;
    const char *keys[65] = {"a", NULL};
    REFUSED(syncguard_lock_all(client, keys, 2, NULL, &guard), "keys[1] is NULL");
    EXPECT(guard == NULL);
    REFUSED(syncguard_lock_all(client, NULL, 1, NULL, &guard), "keys is NULL");
    REFUSED(syncguard_lock_all(client, NULL, 0, NULL, &guard), "no key");
    REFUSED(syncguard_lock_all(client, keys, (size_t)-1, NULL, &guard), "number of keys");
    keys[1] = "\xff";
    REFUSED(syncguard_try_lock_all(client, keys, 2, NULL, &guard), "keys[1] is not UTF-8");
    /* An omega and an Ohm sign: one key with two names. */
    keys[0] = "\xce\xa9";
    keys[1] = "\xe2\x84\xa6";
    ANSWERS(syncguard_try_lock_all(client, keys, 2, NULL, &guard), SYNCGUARD_OK);
    EXPECT(syncguard_guard_fence(guard) == 1 && number("SELECT count(*) FROM syncguard_locks") == 1);
    syncguard_guard_free(guard);
    char names[65][4];
    for (int n = 0; n < 65; n++) {
        snprintf(names[n], sizeof names[n], "k%d", n);
        keys[n] = names[n];
    }
    REFUSED(syncguard_lock_all(client, keys, 65, NULL, &guard), "64");
    /* Half of a character, one that is too long, a surrogate. */
    const char *broken[] = {"\xe2\x84", "\xf0\x82\x82\xac", "\xed\xa0\x80", "a\xc0\x80"};
    for (int n = 0; n < 4; n++) REFUSED(syncguard_try_lock(client, broken[n], 0, &guard), "key is not UTF-8");
    REFUSED(syncguard_try_lock(client, "", 0, &guard), "empty");
    size_t size = 64 << 20;
    char *huge = malloc(size + 1);
    EXPECT(huge);
    memset(huge, 'k', size);
    huge[size] = 0;
    REFUSED(syncguard_try_lock(client, huge, 0, &guard), "512");
    huge[513] = 0;
    REFUSED(syncguard_try_lock(client, huge, 0, &guard), "513");
    huge[512] = 0;
    ANSWERS(syncguard_try_lock(client, huge, 0, &guard), SYNCGUARD_OK);
    syncguard_guard_free(guard);
    free(huge);
    syncguard_options options = {0};
    options.reserved[0] = 1;
    REFUSED(syncguard_lock_with(client, "a", &options, &guard), "reserved");
    options.reserved[0] = 0;
    options.priority = 1;
    REFUSED(syncguard_lock_with(client, "a", &options, &guard), "fair");
    options.fair = 2;
    REFUSED(syncguard_lock_with(client, "a", &options, &guard), "neither 0 nor 1");
    options.fair = 1;
    REFUSED(syncguard_acquire_permit(client, "p", 2, &options, &guard), "no order");
    ANSWERS(syncguard_lock_with(client, "in order", &options, &guard), SYNCGUARD_OK);
    syncguard_guard_free(guard);
    memset(&options, 0, sizeof options);
    options.min_hold_ms = 2;
    options.max_hold_ms = 1;
    REFUSED(syncguard_lock_with(client, "a", &options, &guard), "max_hold_ms is below min_hold_ms");
    uint32_t in_use = 7;
    REFUSED(syncguard_acquire_permit(client, "p", 0, NULL, &guard), "1 to 1024");
    REFUSED(syncguard_try_acquire_permit(client, "p", 1025, NULL, &guard), "1 to 1024");
    REFUSED(syncguard_permits_in_use(client, "", &in_use), "empty");
    EXPECT(in_use == 0);
    REFUSED(syncguard_permits_in_use(client, "p", NULL), "out is NULL");
    REFUSED(syncguard_elect(client, "e", NULL, NULL, NULL), "lead is NULL");
    REFUSED(syncguard_run_once(client, "j", SYNCGUARD_NUMBER, 1, NULL, NULL, NULL), "job is NULL");
}

static void readers(void) {
    syncguard_guard *one, *two, *writer;
    syncguard_options options = {0};
    options.ttl_ms = 20000;
    ANSWERS(syncguard_read_lock(client, "r", &options, &one), SYNCGUARD_OK);
    ANSWERS(syncguard_try_read_lock(client, "r", NULL, &two), SYNCGUARD_OK);
    EXPECT(syncguard_guard_is_shared(one) == 1 && syncguard_guard_is_shared(two) == 1 && syncguard_guard_permit(one) == 0);
    EXPECT(syncguard_guard_fence(one) == 1 && syncguard_guard_fence(two) == 1 && syncguard_guard_fence_of(two, "r") == 1);
    EXPECT(number("SELECT count(*) FROM syncguard_members WHERE role = 's'") == 2);
    ANSWERS(syncguard_try_lock(client, "r", 0, &writer), SYNCGUARD_LOCKED);
    ANSWERS(syncguard_guard_extend(one, 10000), SYNCGUARD_OK);
    char *check;
    ANSWERS(syncguard_guard_fence_sql(two, &check), SYNCGUARD_OK);
    EXPECT(strcmp(transaction(check), "") == 0);
    ANSWERS(syncguard_guard_release(two), SYNCGUARD_OK);
    EXPECT(strcmp(transaction(check), "22P02") == 0);
    syncguard_text_free(check);
    syncguard_guard_free(two);
    syncguard_guard_free(one);
    ANSWERS(syncguard_try_lock(client, "r", 0, &writer), SYNCGUARD_OK);
    EXPECT(syncguard_guard_is_shared(writer) == 0 && syncguard_guard_fence(writer) == 2);
    ANSWERS(syncguard_try_read_lock(client, "r", NULL, &one), SYNCGUARD_LOCKED);
    /* Long enough for one attempt: what is cut short is no timeout of the wait. */
    options.timeout_ms = 2000;
    ANSWERS(syncguard_read_lock(client, "r", &options, &one), SYNCGUARD_ACQUISITION_TIMEOUT);
    EXPECT(one == NULL);
    syncguard_guard_free(writer);
}

static void permits(void) {
    syncguard_guard *one, *two, *three;
    uint32_t in_use;
    ANSWERS(syncguard_acquire_permit(client, "p", 2, NULL, &one), SYNCGUARD_OK);
    ANSWERS(syncguard_try_acquire_permit(client, "p", 2, NULL, &two), SYNCGUARD_OK);
    EXPECT(syncguard_guard_permit(one) + syncguard_guard_permit(two) == 3 && syncguard_guard_fence(two) > 0);
    ANSWERS(syncguard_try_acquire_permit(client, "p", 2, NULL, &three), SYNCGUARD_LOCKED);
    EXPECT(three == NULL);
    syncguard_options options = {0};
    /* Long enough for one attempt: what is cut short is no timeout of the wait. */
    options.timeout_ms = 2000;
    ANSWERS(syncguard_acquire_permit(client, "p", 2, &options, &three), SYNCGUARD_ACQUISITION_TIMEOUT);
    EXPECT(strstr(syncguard_last_error(), "raise timeout_ms") && syncguard_last_error_may_be_held_ms() == 0);
    ANSWERS(syncguard_permits_in_use(client, "p", &in_use), SYNCGUARD_OK);
    EXPECT(in_use == 2);
    char *check;
    ANSWERS(syncguard_guard_fence_sql(two, &check), SYNCGUARD_OK);
    EXPECT(strcmp(transaction(check), "") == 0);
    syncguard_guard_free(two);
    EXPECT(strcmp(transaction(check), "22P02") == 0);
    syncguard_text_free(check);
    ANSWERS(syncguard_permits_in_use(client, "p", &in_use), SYNCGUARD_OK);
    EXPECT(in_use == 1);
    syncguard_guard_free(one);
}

static uint64_t terms[2];

static int32_t lead(const syncguard_term *term, void *user) {
    int *round = user;
    uint64_t number = 0;
    int64_t since, until;
    terms[*round] = syncguard_term_number(term);
    EXPECT(syncguard_term_is_held(term) && syncguard_term_remaining_ms(term) > 0);
    ANSWERS(syncguard_term_wait_lost(term, 1), SYNCGUARD_OK);
    ANSWERS(syncguard_leader(client, "e", &number, &since, &until), SYNCGUARD_OK);
    EXPECT(number == terms[*round] && since > 0 && until > since);
    ANSWERS(syncguard_leader(client, "e", NULL, NULL, NULL), SYNCGUARD_OK);
    char *check;
    ANSWERS(syncguard_term_fence_sql(term, &check), SYNCGUARD_OK);
    EXPECT(strcmp(transaction(check), "") == 0);
    syncguard_text_free(check);
    if (*round == 0) {
        RUN("DELETE FROM syncguard_locks");
        ANSWERS(syncguard_term_wait_lost(term, LIMIT_MS), SYNCGUARD_NOT_HELD);
        EXPECT(!syncguard_term_is_held(term) && syncguard_term_remaining_ms(term) == 0);
    }
    return (*round)++;
}

static void election(void) {
    int round = 0;
    syncguard_options options = {0};
    options.ttl_ms = 6000;
    ANSWERS(syncguard_leader(client, "e", NULL, NULL, NULL), SYNCGUARD_NOT_HELD);
    ANSWERS(syncguard_elect(client, "e", &options, lead, &round), SYNCGUARD_OK);
    EXPECT(round == 2 && terms[1] > terms[0] && terms[0] > 0);
    uint64_t number = 7;
    ANSWERS(syncguard_leader(client, "e", &number, NULL, NULL), SYNCGUARD_NOT_HELD);
    EXPECT(number == 0);
}

static void owners(void) {
    syncguard_client *owned = NULL;
    syncguard_client_options who = {0};
    who.owner = "c:4711";
    who.schema = test_schema;
    ANSWERS(syncguard_client_connect_with(test_url, &who, &owned), SYNCGUARD_OK);
    syncguard_options options = {0};
    options.note = "b\xc3\xbc" "cher\n";
    syncguard_guard *guard = NULL, *none = NULL;
    uint64_t fence = 7;
    int64_t until = 7;
    char *owner = NULL, *note = NULL;
    ANSWERS(syncguard_holder(client, "o", &fence, &until, &owner, &note), SYNCGUARD_NOT_HELD);
    EXPECT(fence == 0 && until == 0 && !owner && !note);
    ANSWERS(syncguard_lock_with(owned, "o", &options, &guard), SYNCGUARD_OK);
    ANSWERS(syncguard_holder(client, "o", &fence, &until, &owner, &note), SYNCGUARD_OK);
    EXPECT(fence == syncguard_guard_fence(guard) && until > 0);
    EXPECT(owner && note && strcmp(owner, who.owner) == 0 && strcmp(note, options.note) == 0);
    ANSWERS(syncguard_holder(client, "o", NULL, NULL, NULL, NULL), SYNCGUARD_OK);
    options.timeout_ms = 2000;
    ANSWERS(syncguard_lock_with(client, "o", &options, &none), SYNCGUARD_ACQUISITION_TIMEOUT);
    EXPECT(strstr(syncguard_last_error(), "held by c:4711 (b\xc3\xbc" "cher\\u{a}) under fencing token ") != NULL);
    syncguard_text_free(owner);
    syncguard_text_free(note);
    syncguard_guard_free(guard);
    char words[1026];
    memset(words, 'x', sizeof words);
    words[1025] = 0;
    options.note = words;
    REFUSED(syncguard_lock_with(owned, "o", &options, &guard), "the note");
    who.owner = words;
    syncguard_client_free(owned);
    REFUSED(syncguard_client_connect_with(test_url, &who, &owned), "the owner");
    REFUSED(syncguard_holder(NULL, "o", NULL, NULL, NULL, NULL), "client");
}

static int32_t never(const syncguard_term *term, void *user) {
    (void)term;
    (void)user;
    EXPECT(0 && "this campaign is not won");
    return 1;
}

static void *campaign(void *token) {
    syncguard_options options = {0};
    options.token = token;
    ANSWERS(syncguard_elect(client, "campaign in c", &options, never, NULL), SYNCGUARD_ABORTED);
    return NULL;
}

static void campaign_cancelled(void) {
    syncguard_guard *held;
    syncguard_token *token;
    pthread_t thread;
    ANSWERS(syncguard_lock(client, "campaign in c", 0, 0, &held), SYNCGUARD_OK);
    ANSWERS(syncguard_token_new(&token), SYNCGUARD_OK);
    EXPECT(pthread_create(&thread, NULL, campaign, token) == 0);
    WAIT_FOR_WAITER("campaign in c");
    EXPECT(!syncguard_token_is_cancelled(token));
    ANSWERS(syncguard_token_cancel(token), SYNCGUARD_OK);
    EXPECT(syncguard_token_is_cancelled(token));
    pthread_join(thread, NULL);
    campaign(token);
    syncguard_token_free(token);
    syncguard_guard_free(held);
}

struct seen {
    int runs;
    int32_t answer;
    uint64_t slot, begin, skipped;
    const char *end;
};

static int32_t job(const syncguard_run *run, void *user) {
    struct seen *seen = user;
    seen->runs++;
    seen->slot = syncguard_run_slot(run);
    seen->begin = syncguard_run_period_start_ms(run);
    seen->skipped = syncguard_run_skipped(run);
    EXPECT(syncguard_run_remaining_ms(run) > 0);
    EXPECT(syncguard_run_fence(run) > 0 && syncguard_run_is_held(run));
    ANSWERS(syncguard_run_wait_lost(run, 1), SYNCGUARD_OK);
    if (seen->end) {
        char *complete;
        ANSWERS(syncguard_run_completion_sql(run, &complete), SYNCGUARD_OK);
        RUN("BEGIN");
        RUN(complete);
        RUN("INSERT INTO effects VALUES (1)");
        RUN(seen->end);
        syncguard_text_free(complete);
    }
    return seen->answer;
}

static int32_t claimed(const syncguard_run *run, void *user) {
    char *complete = (char *)1;
    (void)user;
    REFUSED(syncguard_run_completion_sql(run, &complete), "SYNCGUARD_CLAIM_AT_START");
    EXPECT(complete == NULL);
    return 1;
}

#define ONCE(slot, value, job, user) syncguard_run_once(client, "j", slot, value, NULL, job, user)

static void once(void) {
    struct seen seen = {0, 0, 0, 0, 0, NULL};
    ANSWERS(ONCE(SYNCGUARD_NUMBER, 7, job, &seen), SYNCGUARD_OK);
    EXPECT(seen.runs == 1 && seen.slot == 7 && seen.begin == 0 && seen.skipped == 0);
    ANSWERS(ONCE(SYNCGUARD_NUMBER, 7, job, &seen), SYNCGUARD_ALREADY_DONE);
    seen.answer = 3;
    ANSWERS(ONCE(SYNCGUARD_NUMBER, 10, job, &seen), SYNCGUARD_FAILED);
    EXPECT(seen.skipped == 2);
    seen.answer = 0;
    ANSWERS(ONCE(SYNCGUARD_NUMBER, 10, job, &seen), SYNCGUARD_OK);
    EXPECT(seen.runs == 3);
    ANSWERS(ONCE(SYNCGUARD_EVERY, 86400000, job, &seen), SYNCGUARD_OK);
    EXPECT(seen.begin == seen.slot * 86400000 && seen.slot > 0);
    ANSWERS(ONCE(SYNCGUARD_NUMBER | SYNCGUARD_CLAIM_AT_START, 11, claimed, NULL), SYNCGUARD_FAILED);
    ANSWERS(ONCE(SYNCGUARD_NUMBER, 11, job, &seen), SYNCGUARD_ALREADY_DONE);
    syncguard_guard *guard;
    ANSWERS(syncguard_lock(client, "j", 0, 0, &guard), SYNCGUARD_OK);
    ANSWERS(ONCE(SYNCGUARD_NUMBER, 12, job, &seen), SYNCGUARD_RUNNING);
    syncguard_guard_free(guard);
    EXPECT(seen.runs == 4);
    const int32_t kinds[] = {0, 3, 16, -1, 18 + 4};
    for (int n = 0; n < 5; n++) REFUSED(ONCE(kinds[n], 12, job, &seen), "SYNCGUARD_EVERY");
    REFUSED(ONCE(SYNCGUARD_EVERY, 0, job, &seen), "below 1 ms");
    REFUSED(ONCE(SYNCGUARD_NUMBER, UINT64_MAX, job, &seen), "above");
}

static void once_completed(void) {
    struct seen seen = {0, 0, 0, 0, 0, "ROLLBACK"};
    ANSWERS(ONCE(SYNCGUARD_NUMBER, 7, job, &seen), SYNCGUARD_ABORTED);
    EXPECT(strncmp(syncguard_last_error(), "the job ran", 11) == 0);
    EXPECT(strstr(syncguard_last_error(), "syncguard_run_completion_sql"));
    seen.end = "COMMIT";
    ANSWERS(ONCE(SYNCGUARD_NUMBER, 7, job, &seen), SYNCGUARD_OK);
    ANSWERS(ONCE(SYNCGUARD_NUMBER, 7, job, &seen), SYNCGUARD_ALREADY_DONE);
    EXPECT(number("SELECT count(*) FROM effects") == 1 && seen.runs == 2);
}

int main(int count, char **arguments) {
    const struct test tests[] = {CASE(several), CASE(bad_input), CASE(readers), CASE(permits), CASE(election), CASE(owners),
                                 CASE(campaign_cancelled), CASE(once), CASE(once_completed), {NULL, NULL}};
    return run_case(count, arguments, tests);
}
