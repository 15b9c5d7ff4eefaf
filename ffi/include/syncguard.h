/*
 * syncguard: locks that hold across processes and machines, on PostgreSQL.
 *
 *     syncguard_client *client = NULL;
 *     syncguard_guard *guard = NULL;
 *     if (syncguard_client_connect("postgresql://app@db/app", NULL, &client) != SYNCGUARD_OK ||
 *         syncguard_lock(client, "payment:42", 0, 0, &guard) != SYNCGUARD_OK) {
 *         fprintf(stderr, "%s\n", syncguard_last_error());
 *     }
 *     ...
 *     syncguard_guard_free(guard);
 *     syncguard_client_free(client);
 *
 * RULES
 * - Text is UTF-8 and ends with a zero byte. Times are milliseconds. Structs are zero except for what you
 *   set: syncguard_options options = {0}; options.ttl_ms = 10000;
 * - Every function accepts NULL where it takes a handle: queries answer "no", _free functions do
 *   nothing, everything else answers SYNCGUARD_INVALID_ARGUMENT. Options may be NULL: the defaults.
 * - Functions on one handle may run on several threads at the same time, except those whose name
 *   ends in _free: such a call must be the last use of the handle. Freeing twice, or using a freed
 *   handle, is undefined behaviour, as with free(). Set your variable to NULL afterwards.
 * - A guard keeps what it needs of its client: they may be freed in any order.
 * - A client that was closed answers SYNCGUARD_ABORTED, a guard that was released SYNCGUARD_NOT_HELD.
 * - A process that forks must create its clients after the fork. In the child the parent's handles
 *   answer SYNCGUARD_INVALID_ARGUMENT or "no", and freeing them there leaves the parent's locks alone.
 * - An out parameter is set to NULL, or 0, when the function does not answer SYNCGUARD_OK.
 * - Callbacks may call every function, with one restriction: syncguard_client_close and the functions that end a
 *   guard wait for a callback that runs on another thread, so do not call them while you hold a mutex that the
 *   callback waits for. A callback must return: a C++ exception that leaves it ends the program, and longjmp and
 *   pthread_exit out of it are undefined behaviour.
 * - None of this is for signal handlers. To end waits at SIGTERM, block it in every thread and let one of them
 *   sigwait() for it and call syncguard_token_cancel (ffi/examples/jobs.c).
 * - A failure inside the library never crosses into C: the function answers SYNCGUARD_PANIC. Only if no
 *   memory is left does the program end, by abort().
 * - Once loaded the library stays: dlclose() does not unload it, because its threads end a little after the
 *   last handle.
 */
#ifndef SYNCGUARD_H
#define SYNCGUARD_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this header; syncguard_version() is that of the library that was linked. */
#define SYNCGUARD_VERSION "0.1.0"
#define SYNCGUARD_VERSION_MAJOR 0
#define SYNCGUARD_VERSION_MINOR 1
#define SYNCGUARD_VERSION_PATCH 0

/* Answers that are not failures. */
#define SYNCGUARD_OK 0
#define SYNCGUARD_LOCKED 1        /* somebody else holds the key, or all permits */
#define SYNCGUARD_NOT_HELD 2      /* the lease is over, or was released; nobody leads */
#define SYNCGUARD_ALREADY_DONE 3  /* the slot of the job, or a later one, is done */
#define SYNCGUARD_RUNNING 4       /* somebody else holds the lease of the job */
#define SYNCGUARD_FAILED 5        /* the job ran and did not return 0 */

/* Failures: one for each error code of the library. */
#define SYNCGUARD_SERVICE_UNAVAILABLE (-1)  /* the server is away, or rolled back because of a conflict */
#define SYNCGUARD_AUTH_FAILED (-2)          /* wrong credentials, or a missing right */
#define SYNCGUARD_INVALID_ARGUMENT (-3)     /* the same call will fail again */
#define SYNCGUARD_RATE_LIMITED (-4)         /* no connection was free */
#define SYNCGUARD_NETWORK_TIMEOUT (-5)      /* an operation's own time ran out */
#define SYNCGUARD_ACQUISITION_TIMEOUT (-6)  /* waiting for the key took longer than the timeout */
#define SYNCGUARD_ABORTED (-7)              /* the token was cancelled, or the client was closed; the job's lease was lost */
#define SYNCGUARD_INTERNAL (-8)             /* anything else */
#define SYNCGUARD_PANIC (-100)              /* a bug in the library: please report it */

/* For timeout_ms: wait without a limit. */
#define SYNCGUARD_FOREVER UINT64_MAX

typedef struct syncguard_client syncguard_client;
typedef struct syncguard_guard syncguard_guard;
typedef struct syncguard_token syncguard_token;
typedef struct syncguard_term syncguard_term;
typedef struct syncguard_run syncguard_run;

/* ---- Clients ------------------------------------------------------------------------------------ */

/* The options of a client. 0 and NULL: the default. */
typedef struct syncguard_client_options {
    const char *schema;              /* where the tables are; default: where the search path finds them */
    const char *table_name;          /* of leases; default: syncguard_locks */
    const char *fence_table_name;    /* of fences; default: syncguard_fence_counters */
    uint64_t connection_timeout_ms;  /* how long a call waits for a free connection; default: 5 s */
    uint64_t operation_timeout_ms;   /* how long a call to the server takes at most; default: 5 s */
    uint32_t max_connections;        /* default: 10 */
    uint32_t existing_tables_only;   /* 1: do not create the tables; for roles that may not */
    const char *members_table_name;  /* of readers; default: syncguard_members, or the lock table's name and _members */
    const char *owner;               /* who this program is, shown to others that ask who has a key; at most 1 KiB */
    uint64_t reserved[2];            /* zero */
} syncguard_client_options;

/*
 * Connects, and creates the two tables if they are missing. `schema` says where they are; NULL: where the
 * search path finds them. TLS and everything else is in the url, as docs/connecting.md says. Takes at most 6 times
 * operation_timeout_ms.
 */
int32_t syncguard_client_connect(const char *url, const char *schema, syncguard_client **out);

/* The same with options. */
int32_t syncguard_client_connect_with(const char *url, const syncguard_client_options *options, syncguard_client **out);

/*
 * Ends the client: no new locks, waits end with SYNCGUARD_ABORTED, holders are told, leases are released. Takes at
 * most deadline_ms. SYNCGUARD_OK: nothing is left. SYNCGUARD_NETWORK_TIMEOUT: remaining leases end with their ttl.
 * The handle still has to be freed.
 */
int32_t syncguard_client_close(const syncguard_client *client, uint64_t deadline_ms);

/* Frees the handle. Guards of this client stay valid. */
void syncguard_client_free(syncguard_client *client);

/* ---- Tokens, which end waits ---------------------------------------------------------------------- */

int32_t syncguard_token_new(syncguard_token **out);

/* A token that is cancelled with this one, and can be cancelled by itself. */
int32_t syncguard_token_child(const syncguard_token *token, syncguard_token **out);

/*
 * Ends every wait of a call that got this token, with SYNCGUARD_ABORTED, now and later: well within half a
 * second, even while the server does not answer. Held locks are not released. Cannot be undone.
 */
int32_t syncguard_token_cancel(const syncguard_token *token);

/* 1 after syncguard_token_cancel, else 0. */
int32_t syncguard_token_is_cancelled(const syncguard_token *token);

void syncguard_token_free(syncguard_token *token);

/* ---- Locks ---------------------------------------------------------------------------------------- */

/* The options of a lock. 0 and NULL: the default. */
typedef struct syncguard_options {
    uint64_t ttl_ms;               /* how long the key stays taken if this process dies; default: 30 s */
    uint64_t timeout_ms;           /* how long to wait; default: 5 s; or SYNCGUARD_FOREVER */
    uint64_t min_hold_ms;          /* the key stays taken this long from its grant, released or not; default: 0 */
    uint64_t max_hold_ms;          /* the lock counts as lost this long after its grant; default: never */
    const syncguard_token *token;  /* ends the wait */
    const char *note;              /* what it is held for, shown to others that ask who has the key; at most 1 KiB */
    uint32_t fair;                 /* 1: waiters that ask for it are served in order; for one key, and for elections */
    int32_t priority;              /* with fair: greater numbers first, among equals the longest wait */
    uint64_t reserved[1];          /* zero */
} syncguard_options;

/*
 * Waits for the lock. ttl_ms: how long the key stays taken if this process dies; 0: 30 s. It is
 * renewed while the guard lives. timeout_ms: how long to wait; 0: 5 s; or SYNCGUARD_FOREVER.
 */
int32_t syncguard_lock(const syncguard_client *client, const char *key, uint64_t ttl_ms, uint64_t timeout_ms, syncguard_guard **out);
int32_t syncguard_lock_with(const syncguard_client *client, const char *key, const syncguard_options *options, syncguard_guard **out);

/* Tries once. SYNCGUARD_LOCKED: somebody else holds the key. */
int32_t syncguard_try_lock(const syncguard_client *client, const char *key, uint64_t ttl_ms, syncguard_guard **out);
int32_t syncguard_try_lock_with(const syncguard_client *client, const char *key, const syncguard_options *options, syncguard_guard **out);

/*
 * Shares the key with other readers, and with no writer: a writer takes the plain key, with one of the functions above.
 * A reader yields to a writer that has waited longer. Readers that have the key at the same time have one fence.
 * Needs the optional table of members, which the first call creates unless existing_tables_only.
 */
int32_t syncguard_read_lock(const syncguard_client *client, const char *key, const syncguard_options *options, syncguard_guard **out);

/* Tries once. SYNCGUARD_LOCKED: a writer holds the key, or waits for it. */
int32_t syncguard_try_read_lock(const syncguard_client *client, const char *key, const syncguard_options *options, syncguard_guard **out);

/*
 * Takes 1 to 64 keys together, all or none, under one guard, and holds nothing while it waits: no order of the keys
 * can deadlock. They are renewed, lost and released together.
 */
int32_t syncguard_lock_all(const syncguard_client *client, const char *const *keys, size_t count, const syncguard_options *options, syncguard_guard **out);
int32_t syncguard_try_lock_all(const syncguard_client *client, const char *const *keys, size_t count, const syncguard_options *options, syncguard_guard **out);

/*
 * Takes one of `limit` (1 to 1024) permits of a semaphore with this name: at most that many are held at a time, on
 * all machines together. Every program should name the same limit.
 */
int32_t syncguard_acquire_permit(const syncguard_client *client, const char *name, uint32_t limit, const syncguard_options *options, syncguard_guard **out);
int32_t syncguard_try_acquire_permit(const syncguard_client *client, const char *name, uint32_t limit, const syncguard_options *options, syncguard_guard **out);

/* How many permits of this name are held now, whatever their limit. For display. */
int32_t syncguard_permits_in_use(const syncguard_client *client, const char *name, uint32_t *out);

/* ---- Guards --------------------------------------------------------------------------------------- */

/*
 * The fence of the grant: greater than that of every earlier grant of the key, at least 1. 0 for NULL, and for a
 * guard of several keys, which has a fence for each.
 */
uint64_t syncguard_guard_fence(const syncguard_guard *guard);

/* The fence of this key of the guard; 0 if the guard has no such key. */
uint64_t syncguard_guard_fence_of(const syncguard_guard *guard, const char *key);

/* Which of its semaphore's permits this is, from 1; 0 if it is a lock. */
uint32_t syncguard_guard_permit(const syncguard_guard *guard);

/* 1 if it is a reader's, else 0. */
int32_t syncguard_guard_is_shared(const syncguard_guard *guard);

/* 1 while the lease can be trusted, else 0. No network, no waiting. */
int32_t syncguard_guard_is_held(const syncguard_guard *guard);

/* How long the lease can be trusted without a further renewal; 0 once it is over. */
uint64_t syncguard_guard_remaining_ms(const syncguard_guard *guard);

/*
 * Waits until the lease is lost or the guard released, at most timeout_ms. SYNCGUARD_NOT_HELD: stop the work.
 * SYNCGUARD_OK: the time is over and the lease was still held.
 */
int32_t syncguard_guard_wait_lost(const syncguard_guard *guard, uint64_t timeout_ms);

/* Gets the reason; the text is valid during the call. */
typedef void (*syncguard_on_lost)(const char *reason, void *user);

/*
 * Calls back once if the lease is lost while the guard lives, on a thread of the library: be short, renewals wait for
 * it. Replaces an earlier callback; NULL removes it. If the lease is already lost, the callback is called now, on
 * this thread, and the answer is SYNCGUARD_NOT_HELD; if the guard was released, it is not called, with the same answer.
 *
 * After syncguard_guard_release, _release_now or _free has returned, the callback does not run and is not called any
 * more: they wait for it, unless the callback itself calls them.
 */
int32_t syncguard_guard_on_lost(const syncguard_guard *guard, syncguard_on_lost callback, void *user);

/* Makes the lease end ttl_ms from now; later renewals use the same ttl. SYNCGUARD_NOT_HELD: it was lost. */
int32_t syncguard_guard_extend(const syncguard_guard *guard, uint64_t ttl_ms);

/*
 * For writes with libpq to the database that the locks are in: the statement that fails unless the lease is live and
 * its fence the newest. Run it first in the outermost transaction (BEGIN, this, your statements, COMMIT). While that
 * is open nobody else is granted the key, so keep it short. If it fails (SQLSTATE 22P02) the lease is over: roll
 * back and stop. If you ignore the failure, COMMIT rolls back all the same, and PQcmdStatus says ROLLBACK.
 *
 * It has no parameters. It contains the key and the lock id: do not log it. Free it with syncguard_text_free.
 * SYNCGUARD_NOT_HELD: the guard was released. Needs no network where the tables are known, as they are after a
 * grant; else takes at most operation_timeout_ms.
 */
int32_t syncguard_guard_fence_sql(const syncguard_guard *guard, char **out);

/*
 * Releases the lock. SYNCGUARD_NOT_HELD: it was lost, or released before. After a failure the
 * library keeps trying until the lease is over. The handle still has to be freed.
 * While another thread is in syncguard_guard_extend or _fence_sql, that call releases the lock at its end.
 */
int32_t syncguard_guard_release(const syncguard_guard *guard);

/* The same, and ends min_hold_ms early: the key is free at once. */
int32_t syncguard_guard_release_now(const syncguard_guard *guard);

/* Releases the lock if that has not been done, and frees the handle. */
void syncguard_guard_free(syncguard_guard *guard);

/* ---- Leader election ------------------------------------------------------------------------------- */

/* Leads. 0: steps down and campaigns again; anything else: steps down and ends syncguard_elect. */
typedef int32_t (*syncguard_lead)(const syncguard_term *term, void *user);

/*
 * Campaigns for the key, calls `lead` on this thread for each term that is won, and campaigns again, until `lead`
 * returns something other than 0: then it answers SYNCGUARD_OK. A server that is away is waited for; the token of the options ends
 * the campaign (SYNCGUARD_ABORTED), but not a term that has begun. timeout_ms is not used.
 *
 * A term is valid until `lead` returns, on every thread: join threads that work for the leader before that.
 */
int32_t syncguard_elect(const syncguard_client *client, const char *key, const syncguard_options *options, syncguard_lead lead, void *user);

/*
 * Who leads, by the server's clock (Unix milliseconds): the number of the term, since when, until when if it is not
 * renewed. SYNCGUARD_NOT_HELD: nobody. Out parameters may be NULL.
 */
int32_t syncguard_leader(const syncguard_client *client, const char *key, uint64_t *term, int64_t *since_ms, int64_t *expires_at_ms);

/*
 * Who holds a key, as a lock or as a leader: the fence, the end unless it is renewed, and the holder's owner and
 * note, NULL if it gave none. Free both with syncguard_text_free; they are text from somebody else. SYNCGUARD_NOT_HELD:
 * nobody. Out parameters may be NULL. For display.
 */
int32_t syncguard_holder(const syncguard_client *client, const char *key, uint64_t *fence, int64_t *expires_at_ms, char **owner, char **note);

/* The number of the term, which is its fence: greater than that of every earlier term of the key. */
uint64_t syncguard_term_number(const syncguard_term *term);

/* As for a guard. */
int32_t syncguard_term_is_held(const syncguard_term *term);
uint64_t syncguard_term_remaining_ms(const syncguard_term *term);
int32_t syncguard_term_wait_lost(const syncguard_term *term, uint64_t timeout_ms);
int32_t syncguard_term_fence_sql(const syncguard_term *term, char **out);

/* ---- Jobs that run once per slot --------------------------------------------------------------------- */

/* The job. 0: it is done. Anything else: it failed, and may run again. */
typedef int32_t (*syncguard_job)(const syncguard_run *run, void *user);

/* The slot: the current period of `value` ms by the server's clock (those of a day begin at midnight UTC) … */
#define SYNCGUARD_EVERY 1
/* … or `value` is a number of your own calendar, which grows, such as 20261128. */
#define SYNCGUARD_NUMBER 2
/* Add this to mark the slot before the job runs: at most once, and not again after a crash or a failure. */
#define SYNCGUARD_CLAIM_AT_START 16

/*
 * Runs the job on this thread, unless its slot is done or somebody else runs it, and marks the slot as done.
 * SYNCGUARD_OK: it ran and is marked. SYNCGUARD_FAILED: it did not return 0. SYNCGUARD_ALREADY_DONE,
 * SYNCGUARD_RUNNING: it did not run. A failure whose text begins with "the job ran" means that the slot could not be
 * marked, and may run again; with all other failures the job has not run. Does not wait for another run.
 */
int32_t syncguard_run_once(const syncguard_client *client, const char *name, int32_t slot, uint64_t value, const syncguard_options *options, syncguard_job job, void *user);

/* The number of the slot: the server's clock divided by the period, rounded down; or your number. */
uint64_t syncguard_run_slot(const syncguard_run *run);

/* When the period began, in Unix milliseconds of the server's clock, to name files and rows by; 0 for your number. */
uint64_t syncguard_run_period_start_ms(const syncguard_run *run);

/* How many slots were missed between the last one that was marked and this one. */
uint64_t syncguard_run_skipped(const syncguard_run *run);

uint64_t syncguard_run_fence(const syncguard_run *run);

/* As for a guard. A run is valid until the job returns. */
int32_t syncguard_run_is_held(const syncguard_run *run);
uint64_t syncguard_run_remaining_ms(const syncguard_run *run);
int32_t syncguard_run_wait_lost(const syncguard_run *run, uint64_t timeout_ms);

/*
 * Exactly once, for what the job writes with libpq to the database that the locks are in: two statements that mark the
 * slot, and fail unless the run's lease is live and its fence the newest. Run them first in the outermost
 * transaction, and commit that before the job returns: only that transaction then marks the slot. One transaction
 * per run. For the rest see syncguard_guard_fence_sql. Not with SYNCGUARD_CLAIM_AT_START.
 */
int32_t syncguard_run_completion_sql(const syncguard_run *run, char **out);

/* ---- Texts ----------------------------------------------------------------------------------------- */

/* Frees a text of syncguard_holder, or of one of the functions whose name ends in _sql. NULL does nothing. */
void syncguard_text_free(char *text);

/*
 * What failed last on this thread, and what to do; "" if nothing failed. Contains no keys and no
 * passwords. Valid until the next failure on this thread: copy it, do not free it.
 */
const char *syncguard_last_error(void);

/* Of the same failure: the SQLSTATE that the server answered with, or "". */
const char *syncguard_last_error_sqlstate(void);

/*
 * Of the same failure: 0 if it certainly changed nothing. Else its outcome is unknown, and the key may stay held for
 * this long; SYNCGUARD_FOREVER: until the lease's own end. The library keeps trying to release it meanwhile.
 */
uint64_t syncguard_last_error_may_be_held_ms(void);

/* The name of a code, such as "AcquisitionTimeout". Never NULL, do not free it. */
const char *syncguard_code_name(int32_t code);

/* The version of the library, such as "0.1.0". Never NULL, do not free it. */
const char *syncguard_version(void);

#ifdef __cplusplus
}
#endif

#endif
