/*
 * A service of which any number may run: one of them leads and pays a job's interest once a minute, exactly once, into
 * a table of the same database. SIGTERM and SIGINT end it in order: a wait ends at once, a payment is finished.
 *
 *     jobs URL            (any libpq connection string that is a URL)
 *
 * To build it, after scripts/install-c:
 *
 *     cc jobs.c -o jobs $(pkg-config --cflags --libs syncguard libpq) -pthread
 */
#include <libpq-fe.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "syncguard.h"

struct service {
    syncguard_client *client;
    syncguard_token *stop;
    PGconn *sql;
    sigset_t signals;
};

/* Waits for a signal, outside of any handler, and ends what waits. */
static void *watch_signals(void *user)
{
    struct service *service = user;
    int received;
    sigwait(&service->signals, &received);
    syncguard_token_cancel(service->stop);
    return NULL;
}

static int run(PGconn *sql, const char *statement)
{
    PGresult *result = PQexec(sql, statement);
    ExecStatusType status = PQresultStatus(result);
    int failed = status != PGRES_COMMAND_OK && status != PGRES_TUPLES_OK;
    /* A COMMIT of a transaction that failed is answered with ROLLBACK. */
    failed |= strcmp(statement, "COMMIT") == 0 && strcmp(PQcmdStatus(result), "COMMIT") != 0;
    if (failed)
        fprintf(stderr, "%s", PQresultErrorMessage(result));
    PQclear(result);
    return failed;
}

/* One payment: its effects and the mark of its slot are one transaction. */
static int32_t pay(const syncguard_run *job, void *user)
{
    struct service *service = user;
    char *mark = NULL;
    char payment[100];
    snprintf(payment, sizeof payment, "INSERT INTO payment VALUES (%llu)", (unsigned long long)syncguard_run_period_start_ms(job));
    if (syncguard_run_completion_sql(job, &mark) != SYNCGUARD_OK)
        return 1;
    int failed = run(service->sql, "BEGIN") || run(service->sql, mark) || run(service->sql, payment) ||
                 run(service->sql, "COMMIT");
    syncguard_text_free(mark);
    if (failed)
        run(service->sql, "ROLLBACK");
    else
        printf("paid for %llu\n", (unsigned long long)syncguard_run_period_start_ms(job));
    fflush(stdout);
    return failed;
}

/* Leads until the term is lost or the service is stopped. */
static int32_t lead(const syncguard_term *term, void *user)
{
    struct service *service = user;
    printf("leads, term %llu\n", (unsigned long long)syncguard_term_number(term));
    fflush(stdout);
    do {
        if (syncguard_token_is_cancelled(service->stop))
            return 1;
        int32_t code = syncguard_run_once(service->client, "jobs:interest", SYNCGUARD_EVERY, 60000, NULL, pay, service);
        if (code < 0)
            fprintf(stderr, "%s: %s\n", syncguard_code_name(code), syncguard_last_error());
    } while (syncguard_term_wait_lost(term, 200) == SYNCGUARD_OK);
    return 0; /* another may lead now: campaign again */
}

int main(int argc, char **argv)
{
    struct service service = {0};
    pthread_t thread;
    if (argc != 2)
        return fprintf(stderr, "usage: jobs URL\n"), 2;
    /* Before the first thread starts: all of them inherit it. */
    sigemptyset(&service.signals);
    sigaddset(&service.signals, SIGTERM);
    sigaddset(&service.signals, SIGINT);
    pthread_sigmask(SIG_BLOCK, &service.signals, NULL);

    service.sql = PQconnectdb(argv[1]);
    if (PQstatus(service.sql) != CONNECTION_OK)
        return fprintf(stderr, "%s", PQerrorMessage(service.sql)), 1;
    int32_t code = syncguard_client_connect(argv[1], NULL, &service.client);
    if (code != SYNCGUARD_OK || (code = syncguard_token_new(&service.stop)) != SYNCGUARD_OK ||
        run(service.sql, "SET client_min_messages = warning") ||
        run(service.sql, "CREATE TABLE IF NOT EXISTS payment (period int8)") ||
        pthread_create(&thread, NULL, watch_signals, &service) != 0)
        return fprintf(stderr, "%s: %s\n", syncguard_code_name(code), syncguard_last_error()), 1;

    syncguard_options options = {0};
    options.token = service.stop;
    code = syncguard_elect(service.client, "jobs:leader", &options, lead, &service);
    if (code != SYNCGUARD_OK && code != SYNCGUARD_ABORTED)
        fprintf(stderr, "%s: %s\n", syncguard_code_name(code), syncguard_last_error());

    code = syncguard_client_close(service.client, 5000);
    pthread_kill(thread, SIGTERM);
    pthread_join(thread, NULL);
    syncguard_token_free(service.stop);
    syncguard_client_free(service.client);
    PQfinish(service.sql);
    printf("stopped\n");
    return code == SYNCGUARD_OK ? 0 : 1;
}
