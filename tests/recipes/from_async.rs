//! Locks in an async runtime, without a blocked executor.

// recipe: From async code
use std::error::Error;
use syncguard::{LockGuard, PgLockClient};
use tokio::task::{JoinError, spawn_blocking};

/// The wait happens on a thread that may block. The guard may be held across `.await`, and is renewed meanwhile.
async fn lock(locks: &PgLockClient, key: String) -> Result<syncguard::Result<LockGuard>, JoinError> {
    let locks = locks.clone(); // cheap
    spawn_blocking(move || locks.lock(&key)).await
}

async fn handle(locks: &PgLockClient) -> Result<u64, Box<dyn Error + Send + Sync>> {
    let guard = lock(locks, "app:prod:account:7".into()).await??;
    let done = tokio::task::spawn(async { 1 }).await?; // your work
    if !guard.is_held() {
        return Err("the lock was lost".into()); // asks nobody, so it may be called anywhere
    }
    // Data written with an async driver: run `guard.fence_sql()?` first in its transaction.
    spawn_blocking(move || guard.release()).await??; // or drop it: that blocks no executor either
    Ok(done)
}
// end

use tokio::runtime::Builder;

#[test]
fn a_task_waits_for_its_lock_on_a_thread_that_may_block_and_lets_it_go() {
    let schema = crate::support::schema();
    let locks = PgLockClient::connect(&schema.url()).unwrap();
    let held = locks.lock("app:prod:account:7").unwrap();
    // One executor thread: were it blocked, nothing below would go on.
    let runtime = Builder::new_current_thread().build().unwrap();
    let waits = locks.clone();
    let done = runtime.block_on(async move {
        let waits = tokio::spawn(async move { handle(&waits).await.unwrap() });
        tokio::task::yield_now().await;
        let released = spawn_blocking(move || held.release().unwrap());
        released.await.unwrap();
        waits.await.unwrap()
    });
    assert_eq!(done, 1);
    assert!(!locks.is_locked("app:prod:account:7").unwrap());
}
