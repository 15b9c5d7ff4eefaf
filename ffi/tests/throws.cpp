// Callbacks that throw, which ends the program: usage URL SCHEMA lead|job|lost.
#include "syncguard.h"

#include <cstring>
#include <stdexcept>
#include <unistd.h>

static int32_t lead(const syncguard_term *, void *) { throw std::runtime_error("from a term"); }
static int32_t job(const syncguard_run *, void *) { throw std::runtime_error("from a job"); }
static void lost(const char *, void *) { throw std::runtime_error("from on_lost"); }

int main(int count, char **arguments) {
    if (count != 4) return 2;
    syncguard_client *client = nullptr;
    syncguard_guard *guard = nullptr;
    if (syncguard_client_connect(arguments[1], arguments[2], &client) != SYNCGUARD_OK) return 2;
    try {
        if (std::strcmp(arguments[3], "lead") == 0) syncguard_elect(client, "k", nullptr, lead, nullptr);
        if (std::strcmp(arguments[3], "job") == 0) syncguard_run_once(client, "k", SYNCGUARD_NUMBER, 1, nullptr, job, nullptr);
        if (std::strcmp(arguments[3], "lost") == 0) {
            syncguard_options options = {};
            options.max_hold_ms = 10;
            if (syncguard_lock_with(client, "k", &options, &guard) != SYNCGUARD_OK) return 2;
            syncguard_guard_on_lost(guard, lost, nullptr);
            alarm(60);
            pause();
        }
    } catch (...) {
        return 3;
    }
    return 4;
}
