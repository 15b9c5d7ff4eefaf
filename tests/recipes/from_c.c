/* recipe: From C */
#include <stdio.h>
#include <syncguard.h>

int main(int argc, char **argv)                       /* URL SCHEMA */
{
    syncguard_client *client = NULL;
    syncguard_guard *guard = NULL;
    syncguard_options options = {0};                  /* all of it zero: the defaults */
    options.ttl_ms = 10000;
    options.timeout_ms = 5000;
    int32_t code = syncguard_client_connect(argv[1], argc > 2 ? argv[2] : NULL, &client);
    if (code == SYNCGUARD_OK)
        code = syncguard_lock_with(client, "app:prod:payment:42", &options, &guard);
    if (code == SYNCGUARD_OK && syncguard_guard_is_held(guard))
        printf("under fence %llu\n", (unsigned long long)syncguard_guard_fence(guard));
    if (code < 0)
        fprintf(stderr, "%s\n", syncguard_last_error());
    syncguard_guard_free(guard);                      /* lets the lock go; NULL is fine */
    syncguard_client_free(client);
    return code == SYNCGUARD_OK ? 0 : 1;
}
/* end */
