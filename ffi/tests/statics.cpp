// A static whose destructor frees the handles: usage URL SCHEMA static. tests/thread_locals.rs runs it.
#include "syncguard.h"

struct Lock {
    syncguard_client *client = nullptr;
    syncguard_guard *guard = nullptr;
    ~Lock() {
        syncguard_guard_free(guard);
        syncguard_client_free(client);
    }
};

static Lock lock;

int main(int count, char **arguments) {
    if (count != 4) return 2;
    if (syncguard_client_connect(arguments[1], arguments[2], &lock.client) != SYNCGUARD_OK) return 1;
    return syncguard_lock(lock.client, "k", 30000, 0, &lock.guard) == SYNCGUARD_OK ? 0 : 1;
}
