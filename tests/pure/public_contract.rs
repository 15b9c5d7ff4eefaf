//! The names and shapes that other programs are written against. It has to compile: what is moved,
//! renamed or given another type breaks them, whatever else works.

#![allow(clippy::unwrap_used)]

use std::error::Error;
use std::fmt::Display;
use std::hash::Hash;
use std::ops::ControlFlow;
use std::str::FromStr;
use std::time::Duration;

use syncguard::backend::{ExtendOutcome, MarkRun, MarkStep, ReleaseOutcome};
use syncguard::postgres::{self, Client, Config, NoTls, Transaction};
use syncguard::{
    AcquireResult, Acquired, AdvisoryGuard, AdvisoryKey, AdvisoryOptions, Backoff, CancelToken, Capabilities,
    CloseReport, ErrorCode, ExtendResult, Fence, Heartbeat, Jitter, Leader, LockBackend, LockError,
    LockGuard, LockInfo, LockInfoRaw, LockOptions, Lookup, LostReason, MemoryBackend, MultiGuard,
    PgLockClient, PgLockClientBuilder, ReleaseErrorContext, ReleaseResult, Result, Run, RunOnce, Semaphore,
    Slot, TelemetryOptions, Term,
};

type Pool = syncguard::r2d2::Pool<syncguard::r2d2_postgres::PostgresConnectionManager<NoTls>>;

/// Only its compilation says something.
fn builder(pool: Pool, config: &Config) -> [Result<PgLockClient>; 3] {
    let builder: PgLockClientBuilder = PgLockClient::builder()
        .table_name("locks")
        .fence_table_name("fences")
        .members_table_name("members")
        .create_members_table(false)
        .schema("app")
        .auto_create_tables(true)
        .cleanup_in_is_locked(false)
        .max_connections(10)
        .connection_timeout(Duration::from_secs(1))
        .operation_timeout(Duration::from_secs(5))
        .dispose_timeout(Duration::from_secs(5))
        .on_release_error(|_: &LockError, _: &ReleaseErrorContext| ())
        .telemetry(TelemetryOptions::new(|_| ()));
    [
        builder.connect("postgresql://localhost/app"),
        PgLockClient::builder().connect_with(config.clone(), NoTls),
        PgLockClient::builder().maintenance(config.clone(), NoTls).build(pool),
    ]
}

fn lock_options(token: &CancelToken) -> LockOptions {
    LockOptions::new()
        .ttl(Duration::from_secs(30))
        .timeout(Duration::from_secs(5))
        .wait_forever()
        .max_retries(10)
        .retry_delay(Duration::from_millis(100))
        .backoff(Backoff::Exponential)
        .backoff(Backoff::Fixed)
        .jitter(Jitter::Equal)
        .jitter(Jitter::Full)
        .jitter(Jitter::None)
        .heartbeat(Heartbeat::Auto)
        .heartbeat(Heartbeat::Every(Duration::from_secs(1)))
        .heartbeat(Heartbeat::Off)
        .max_hold(Duration::from_secs(60))
        .min_hold(Duration::from_millis(1))
        .cancel(token)
        .on_lost(|_: LostReason| ())
        .on_release_error(|_: &LockError, _: &ReleaseErrorContext| ())
}

fn locks(client: &PgLockClient, options: &LockOptions, token: &CancelToken) -> Result<()> {
    let _: LockGuard = client.lock("a")?;
    let _: LockGuard = client.lock_with("a", options)?;
    let _: Option<LockGuard> = client.try_lock("a")?;
    let _: Option<LockGuard> = client.try_lock_with("a", options)?;
    let _: u8 = client.with_lock("a", options, |_: &LockGuard| 1)?;
    let _: PgLockClient = client.cancellable(token);
    let _: CloseReport = client.close(Duration::ZERO)?;
    client.setup_schema()
}

fn election(client: &PgLockClient, options: &LockOptions, mut sql: Client) -> Result<u8> {
    if let Some(Leader { term, since_ms, expires_at_ms, owner }) = client.leader("a")? {
        let _: (Fence, i64, i64, Option<String>) = (term, since_ms, expires_at_ms, owner);
    }
    client.elect("a", options, |term: &Term| -> ControlFlow<u8> {
        let _: (Fence, bool, Duration, &CancelToken) =
            (term.number(), term.is_held(), term.remaining(), term.lost());
        let mut transaction = sql.transaction().unwrap();
        match term.fence_transaction(&mut transaction) {
            Ok(()) => ControlFlow::Break(1),
            Err(_) => ControlFlow::Continue(()),
        }
    })
}

fn several_keys(client: &PgLockClient, transaction: &mut Transaction<'_>, ttl: Duration) -> Result<()> {
    let (names, options) = (vec![String::from("a")], LockOptions::new());
    let _: MultiGuard = client.lock_all(&["a", "b"])?;
    let _: MultiGuard = client.lock_all_with(&names, &options)?;
    let _: Option<MultiGuard> = client.try_lock_all(&names)?;
    let guard: Option<MultiGuard> = client.try_lock_all_with(&["a"], &options)?;
    let Some(guard) = guard else { return Ok(()) };
    let _: (Vec<&str>, Option<Fence>) = (guard.keys(), guard.fence("a"));
    let _: (bool, Duration, &CancelToken) = (guard.is_held(), guard.remaining(), guard.lost());
    let _: Option<LostReason> = guard.lost_reason();
    let _: ExtendResult = guard.extend(ttl)?;
    guard.fence_transaction(transaction)?;
    let _: ReleaseResult = guard.release()?;
    Ok(())
}

fn operations(client: &PgLockClient, ttl: Duration) -> Result<()> {
    if let AcquireResult::Acquired(Acquired { lock_id, fence, expires_at_ms }) = client.acquire("a", ttl)? {
        let _: (String, Fence, i64) = (lock_id, fence, expires_at_ms);
    }
    match client.release("id")? {
        ReleaseResult::Released | ReleaseResult::NotHeld => {}
    }
    match client.extend("id", ttl)? {
        ExtendResult::Extended { expires_at_ms } => assert!(expires_at_ms > 0),
        ExtendResult::NotHeld => {}
    }
    let _: bool = client.is_locked("a")?;
    let _: Option<LockInfo> = client.lookup(Lookup::Key("a"))?;
    if let Some(info) = client.lookup(Lookup::LockId("id"))? {
        let _: (String, String) = (info.key_hash, info.lock_id_hash);
        let _: (i64, i64, Fence) = (info.expires_at_ms, info.acquired_at_ms, info.fence);
    }
    let _: Capabilities = client.capabilities();
    let _: Option<LockInfo> = client.get_by_key("a")?;
    let _: Option<LockInfo> = client.get_by_id("id")?;
    let _: Option<LockInfoRaw> = client.get_by_key_raw("a")?;
    let _: Option<LockInfoRaw> = client.get_by_id_raw("id")?;
    let _: bool = client.owns("id")?;
    Ok(())
}

fn diagnosis(backend: &impl LockBackend) -> Result<()> {
    let _: Option<LockInfo> = syncguard::get_by_key(backend, "a")?;
    let _: Option<LockInfo> = syncguard::get_by_id(backend, "id")?;
    let _: Option<LockInfoRaw> = syncguard::get_by_key_raw(backend, "a")?;
    let _: Option<LockInfoRaw> = syncguard::get_by_id_raw(backend, "id")?;
    let _: bool = syncguard::owns(backend, "id")?;
    let _: Capabilities = backend.capabilities();
    Ok(())
}

fn held(guard: LockGuard, transaction: &mut Transaction<'_>, ttl: Duration) -> Result<Acquired> {
    let _: (&str, &str, Fence, i64) = (guard.key(), guard.lock_id(), guard.fence(), guard.expires_at_ms());
    let _: (bool, Duration, &CancelToken) = (guard.is_held(), guard.remaining(), guard.lost());
    let _: Option<LostReason> = guard.lost_reason();
    let _: ExtendResult = guard.extend(ttl)?;
    guard.fence_transaction(transaction)?;
    let _: fn(LockGuard) -> Result<ReleaseResult> = LockGuard::release;
    Ok(guard.leak())
}

fn semaphores(client: &PgLockClient, options: &LockOptions) -> Result<u32> {
    let semaphore: Semaphore = client.semaphore("reports", 3)?;
    let _: LockGuard = semaphore.acquire()?;
    let _: LockGuard = semaphore.acquire_with(options)?;
    let _: Option<LockGuard> = semaphore.try_acquire()?;
    let _: Option<LockGuard> = semaphore.try_acquire_with(options)?;
    semaphore.in_use()
}

fn runs(client: &PgLockClient, transaction: &mut Transaction<'_>, options: &LockOptions) -> Result<u8> {
    let daily: Slot = Slot::every(Duration::from_secs(86_400)).claim_at_start();
    let ran: RunOnce<u8, String> = client.run_once("a", daily, options, |run: &Run| {
        let _: (u64, u64, Fence) = (run.slot(), run.skipped(), run.fence());
        let _: (bool, &CancelToken) = (run.is_held(), run.lost());
        run.complete_in(transaction).map(|()| 1).map_err(|error| error.to_string())
    })?;
    let other = client.run_once("a", Slot::number(20_261_128), options, |_run| Err::<u8, u16>(1))?;
    assert_ne!(other, RunOnce::Done(1));
    match ran {
        RunOnce::Done(value) => Ok(value),
        RunOnce::Failed(text) => Err(LockError::new(ErrorCode::Internal).with_message(text)),
        RunOnce::AlreadyDone | RunOnce::Running => Ok(0),
    }
}

fn session_locks(client: &PgLockClient, transaction: &mut Transaction<'_>, fence: Fence) -> Result<()> {
    let _: Option<i64> = AdvisoryKey::from_pair(1, 2).as_i64();
    let _: [AdvisoryKey; 2] = [AdvisoryKey::from_i64(1), AdvisoryKey::namespaced("jobs", "a")?];
    let key = AdvisoryKey::from_text("a");
    let options = AdvisoryOptions::new()
        .timeout(Duration::ZERO)
        .cancel(&CancelToken::new())
        .shared()
        .max_hold(Duration::ZERO);
    let _: Option<AdvisoryGuard> = client.try_advisory_lock(&key)?;
    let _: AdvisoryGuard = client.advisory_lock_with(&key, &options)?;
    let guard: AdvisoryGuard = client.advisory_lock(&key)?;
    let _: (bool, &CancelToken) = (guard.is_held(), guard.lost());
    let _ = guard.release()?;
    client.assert_fence(transaction, "a", fence)
}

/// A backend of somebody's own that has the five operations and no more.
struct Least(MemoryBackend);

impl LockBackend for Least {
    fn acquire(&self, key: &str, ttl: Duration, cancel: &CancelToken) -> Result<AcquireResult> {
        self.0.acquire(key, ttl, cancel)
    }
    fn release(&self, lock_id: &str, cancel: &CancelToken) -> Result<ReleaseOutcome> {
        self.0.release(lock_id, cancel)
    }
    fn extend(&self, lock_id: &str, ttl: Duration, cancel: &CancelToken) -> Result<ExtendOutcome> {
        self.0.extend(lock_id, ttl, cancel)
    }
    fn is_locked(&self, key: &str, cancel: &CancelToken) -> Result<bool> {
        self.0.is_locked(key, cancel)
    }
    fn lookup(&self, what: Lookup<'_>, cancel: &CancelToken) -> Result<Option<LockInfo>> {
        self.0.lookup(what, cancel)
    }
    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }
}

#[test]
fn a_backend_of_the_five_operations_serves_guards_and_refuses_what_it_does_not_have() {
    let client = syncguard::LockClient::new(Least(MemoryBackend::new()));
    let guard = client.lock("a").unwrap();
    assert!(guard.extend(Duration::from_secs(30)).is_ok() && client.get_by_key("a").unwrap().is_some());
    assert!(client.try_lock("a").unwrap().is_none());
    assert_eq!(client.get_by_key_raw("a").unwrap_err().code(), ErrorCode::InvalidArgument);
    assert_eq!(guard.release().unwrap(), ReleaseResult::Released);
    let ran = client.run_once("a", Slot::number(7), &LockOptions::new(), |_run| Ok::<_, ()>(()));
    assert_eq!(ran.unwrap_err().code(), ErrorCode::InvalidArgument);
    let (fence, slot) = (Fence::new(1).unwrap(), Slot::number(7));
    let record = MarkRun::new("a", "id", fence, slot, 7);
    let least = Least(MemoryBackend::new());
    let end = least.clock().now().after(Duration::from_secs(5));
    for refused in [
        least.mark_run(&record, MarkStep::Finish, end).unwrap_err(),
        least.completion_statement(&record).unwrap_err(),
    ] {
        assert!(
            refused.code() == ErrorCode::InvalidArgument && refused.to_string().contains("marks"),
            "{refused}"
        );
    }
}

#[test]
fn what_programs_are_written_against_has_the_same_names_and_shapes() {
    fn anywhere<T: Send + Sync + 'static>() {}
    fn a_handle<T: Clone + Send + Sync + 'static>() {}
    fn a_number<T: Copy + Ord + Hash + Display + FromStr>() {}
    a_handle::<PgLockClient>();
    a_handle::<CancelToken>();
    a_handle::<Semaphore>();
    anywhere::<LockGuard>();
    anywhere::<MultiGuard>();
    anywhere::<AdvisoryGuard>();
    anywhere::<LockError>();
    a_number::<Fence>();
    let _ = (
        builder,
        lock_options,
        locks,
        several_keys,
        election,
        operations,
        held,
        semaphores,
        runs,
        session_locks,
    );
    let _: fn(&str) -> Result<PgLockClient> = PgLockClient::connect;
    let _: fn(&mut Client) -> std::result::Result<Transaction<'_>, postgres::Error> = Client::transaction;

    let token = CancelToken::new();
    let (child, waits): (CancelToken, fn(&CancelToken, Duration) -> bool) =
        (token.child(), CancelToken::wait_timeout);
    token.cancel();
    assert!(child.is_cancelled() && waits(&child, Duration::ZERO));

    let error = LockError::new(ErrorCode::Aborted);
    let _: (Option<&str>, Option<&str>) = (error.key(), error.lock_id());
    assert!(error.code().as_str() == "Aborted" && Error::source(&error).is_none());
    let _: u64 = "000000000000042".parse::<Fence>().unwrap().get();

    let storage: fn(&str, &str, usize, usize) -> Result<String> = syncguard::make_storage_key;
    let counter: fn(&str, &str, usize, usize) -> Result<String> = syncguard::make_fence_key;
    let normal: fn(&str) -> Result<String> = syncguard::normalize_and_validate_key;
    let id: fn(&str) -> Result<()> = syncguard::validate_lock_id;
    let live: fn(i64, i64, i64) -> bool = syncguard::is_live;
    let hash: fn(&str) -> String = syncguard::hash_key;
    let (limit, reserve) = (syncguard::BACKEND_LIMIT_POSTGRES, syncguard::RESERVE_BYTES_POSTGRES);
    assert_eq!(storage("", "a", limit, reserve).unwrap(), normal("a").unwrap());
    assert!(counter("", "a", limit, reserve).is_ok() && id("a").is_err() && hash("a").len() == 24);
    assert!(live(1000, 1500, syncguard::TIME_TOLERANCE_MS) && syncguard::MAX_KEY_LENGTH_BYTES == 512);
    let _: [_; 2] = [syncguard::FENCE_WARN, syncguard::FENCE_MAX];

    let observed = syncguard::with_telemetry(MemoryBackend::new(), TelemetryOptions::new(|_| ()));
    diagnosis(&observed).unwrap_err();
    diagnosis(&MemoryBackend::new()).unwrap_err();
}
