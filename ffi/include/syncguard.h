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
 * - Text is UTF-8 and ends with a zero byte. Times are milliseconds.
 * - Every function accepts NULL where it takes a handle: what asks answers "no", what frees does
 *   nothing, everything else answers SYNCGUARD_INVALID_ARGUMENT.
 * - Functions on one handle may run on several threads at the same time. Only the functions whose
 *   name ends in _free must be the last use of a handle, and the only free of it: freeing twice, or
 *   using a freed handle, is undefined behaviour, as with free(). Set your variable to NULL after it.
 * - A guard keeps what it needs of its client: they may be freed in any order.
 * - A process that forks must create its clients after the fork.
 * - An out parameter is set to NULL when the function does not answer SYNCGUARD_OK.
 * - A failure inside the library never crosses into C: it answers SYNCGUARD_PANIC.
 */
#ifndef SYNCGUARD_H
#define SYNCGUARD_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Answers that are not failures. */
#define SYNCGUARD_OK 0
#define SYNCGUARD_LOCKED 1    /* somebody else holds the key */
#define SYNCGUARD_NOT_HELD 2  /* the lease is over, or was released */

/* Failures: one for each error code of the library. */
#define SYNCGUARD_SERVICE_UNAVAILABLE (-1)  /* the server is away, or rolled a conflict back */
#define SYNCGUARD_AUTH_FAILED (-2)          /* wrong credentials, or a missing right */
#define SYNCGUARD_INVALID_ARGUMENT (-3)     /* the same call will fail again */
#define SYNCGUARD_RATE_LIMITED (-4)         /* no connection was free */
#define SYNCGUARD_NETWORK_TIMEOUT (-5)      /* an operation's own time ran out */
#define SYNCGUARD_ACQUISITION_TIMEOUT (-6)  /* waiting for the key took longer than the timeout */
#define SYNCGUARD_ABORTED (-7)              /* the client was closed */
#define SYNCGUARD_INTERNAL (-8)             /* anything else */
#define SYNCGUARD_PANIC (-100)              /* a bug in the library: please report it */

/* For timeout_ms: wait until the lock is there. */
#define SYNCGUARD_FOREVER UINT64_MAX

typedef struct syncguard_client syncguard_client;
typedef struct syncguard_guard syncguard_guard;

/*
 * Connects without TLS, and creates the two tables if they are missing. `schema` says where they
 * are; NULL: where the search path finds them.
 */
int32_t syncguard_client_connect(const char *url, const char *schema, syncguard_client **out);

/*
 * Ends the client: no new locks, holders are told, leases are let go. Takes at most deadline_ms.
 * SYNCGUARD_OK: nothing is left. SYNCGUARD_NETWORK_TIMEOUT: what is left ends with its ttl.
 * The handle still has to be freed.
 */
int32_t syncguard_client_close(const syncguard_client *client, uint64_t deadline_ms);

/* Frees the handle. Guards of this client stay valid. */
void syncguard_client_free(syncguard_client *client);

/*
 * Waits for the lock. ttl_ms: how long the key stays taken if this process dies; 0: 30 s. It is
 * renewed while the guard lives. timeout_ms: how long to wait; 0: 5 s; or SYNCGUARD_FOREVER.
 */
int32_t syncguard_lock(const syncguard_client *client, const char *key, uint64_t ttl_ms, uint64_t timeout_ms, syncguard_guard **out);

/* Tries once. SYNCGUARD_LOCKED: somebody else holds the key. */
int32_t syncguard_try_lock(const syncguard_client *client, const char *key, uint64_t ttl_ms, syncguard_guard **out);

/* The fence of the grant: greater than that of every earlier grant of the key, at least 1; 0 for NULL. */
uint64_t syncguard_guard_fence(const syncguard_guard *guard);

/* 1 while the lease can be trusted, else 0. No network, no waiting. */
int32_t syncguard_guard_is_held(const syncguard_guard *guard);

/* How long the lease can be trusted without a further renewal; 0 once it is over. */
uint64_t syncguard_guard_remaining_ms(const syncguard_guard *guard);

/*
 * Waits until the lease is lost, at most timeout_ms. SYNCGUARD_NOT_HELD: stop the work.
 * SYNCGUARD_OK: the time is over and the lease was still held. Releasing the guard on another
 * thread does not end the wait, but makes the answer SYNCGUARD_NOT_HELD.
 */
int32_t syncguard_guard_wait_lost(const syncguard_guard *guard, uint64_t timeout_ms);

/* The lease ends ttl_ms from now; later renewals take the same. SYNCGUARD_NOT_HELD: it was lost. */
int32_t syncguard_guard_extend(const syncguard_guard *guard, uint64_t ttl_ms);

/*
 * Lets the lock go. SYNCGUARD_NOT_HELD: it was lost, or released before. After a failure the
 * library goes on trying until the lease is over. The handle still has to be freed.
 * While another thread is in syncguard_guard_extend, that call lets the lock go at its end.
 */
int32_t syncguard_guard_release(const syncguard_guard *guard);

/* Releases the lock if that has not been done, and frees the handle. */
void syncguard_guard_free(syncguard_guard *guard);

/*
 * What failed last on this thread, and what to do; "" if nothing failed. Contains no keys and no
 * passwords. Valid until the next failure on this thread: copy it, do not free it.
 */
const char *syncguard_last_error(void);

/* The name of a code, such as "AcquisitionTimeout". Never NULL, do not free it. */
const char *syncguard_code_name(int32_t code);

#ifdef __cplusplus
}
#endif

#endif
