//! Inside an async runtime: blocking calls are refused in words, and what is dropped there is let go.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crate::support::leases::{self, client, named, row, sessions, wait_until_released};
use crate::support::{LIMIT, TTL, TestSchema, Worker, wait_until, worker};
use r2d2_postgres::PostgresConnectionManager;
use syncguard::{
    ErrorCode, LockError, LockOptions, Lookup, PgLockClient, ReleaseErrorContext, ReleaseResult,
};
use tokio::runtime::{Builder, Runtime};

/// Both flavours: one thread for everything, and several.
fn runtimes() -> [(&'static str, Runtime); 2] {
    [
        ("current_thread", Builder::new_current_thread().enable_all().build().unwrap()),
        ("multi_thread", Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()),
    ]
}

/// Runs it as a task of its own, where the flavour has one for it.
fn run<T: Send + 'static>(runtime: &Runtime, work: impl FnOnce() -> T + Send + 'static) -> T {
    runtime.block_on(async move { tokio::spawn(async move { work() }).await.expect("no panic gets out") })
}

fn keys(flavour: &str) -> [String; 2] {
    [format!("{flavour}-a"), format!("{flavour}-b")]
}

#[test]
fn a_blocking_call_in_an_async_function_is_refused_and_says_what_to_do() {
    let _alone = crate::support::alone();
    let schema = crate::support::schema();
    let (url, warm) = (schema.url(), client(&schema));
    let held = warm.acquire("held", TTL).unwrap().acquired().unwrap();
    for (flavour, runtime) in runtimes() {
        // With a connection that is open already, and with one that would have to be opened.
        let cold = leases::connect(PgLockClient::builder().auto_create_tables(false), &named(&url, flavour));
        for client in [warm.clone(), cold] {
            let (id, url) = (held.lock_id.clone(), url.clone());
            let errors = run(&runtime, move || {
                [
                    client.acquire("k", TTL).unwrap_err(),
                    client.release(&id).unwrap_err(),
                    client.extend(&id, TTL).unwrap_err(),
                    client.is_locked("k").unwrap_err(),
                    client.lookup(Lookup::LockId(&id)).unwrap_err(),
                    client.try_lock("k").unwrap_err(),
                    client.lock("k").unwrap_err(),
                    client.with_lock("k", &LockOptions::new(), |_| ()).unwrap_err(),
                    client.cancellable(&syncguard::CancelToken::new()).acquire("k", TTL).unwrap_err(),
                    client.setup_schema().unwrap_err(),
                    PgLockClient::connect(&url).unwrap_err(),
                ]
            });
            for error in errors {
                assert_eq!(error.code(), ErrorCode::InvalidArgument, "{flavour}: {error:?}");
                assert!(error.to_string().contains("spawn_blocking"), "{error}");
                assert!(!error.is_outcome_unknown(), "{flavour}: {error:?}");
            }
        }
    }
    assert_eq!(warm.release(&held.lock_id).unwrap(), ReleaseResult::Released, "and goes on elsewhere");
    assert_eq!(row(&mut schema.client(), "k"), None);
}

#[test]
fn a_blocking_call_on_a_callers_pool_is_refused_in_the_same_way() {
    let _alone = crate::support::alone();
    let schema = crate::support::schema();
    for (flavour, runtime) in runtimes() {
        let app = format!("refused-{flavour}-{}", schema.name());
        let client = busy_client(&schema, &app, true);
        let guard = client.lock("held").unwrap();
        let id = guard.lock_id().to_owned();
        let inside = client.clone();
        let errors = run(&runtime, move || {
            [
                inside.acquire("k", TTL).unwrap_err(),
                inside.release(&id).unwrap_err(),
                inside.is_locked("k").unwrap_err(),
                inside.lock("k").unwrap_err(),
                inside.cancellable(&syncguard::CancelToken::new()).acquire("k", TTL).unwrap_err(),
                guard.release().unwrap_err(),
            ]
        });
        for error in errors {
            assert_eq!(error.code(), ErrorCode::InvalidArgument, "{flavour}: {error:?}");
            assert!(error.to_string().contains("spawn_blocking"), "{error}");
        }
        wait_until_released(&mut schema.client(), "held");
        assert!(!client.is_locked("k").unwrap());
    }
}

#[test]
fn everything_works_inside_spawn_blocking() {
    let _alone = crate::support::alone();
    let schema = crate::support::schema();
    let client = client(&schema);
    for (flavour, runtime) in runtimes() {
        let (client, [a, b]) = (client.clone(), keys(flavour));
        let task = move || {
            let guard = client.lock(&a).unwrap();
            assert!(client.is_locked(&a).unwrap() && client.try_lock(&a).unwrap().is_none());
            assert_eq!(guard.release().unwrap(), ReleaseResult::Released);
            assert_eq!(client.with_lock(&b, &LockOptions::new(), |guard| guard.fence().get()).unwrap(), 1);
            drop(client.lock(&a).unwrap());
        };
        runtime.block_on(async { tokio::task::spawn_blocking(task).await.unwrap() });
        for key in keys(flavour) {
            wait_until_released(&mut schema.client(), &key);
        }
    }
}

#[test]
fn a_guard_that_is_dropped_in_a_runtime_lets_go() {
    let _alone = crate::support::alone();
    let schema = crate::support::schema();
    let failures = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&failures);
    let count = move |_: &LockError, _: &ReleaseErrorContext| {
        counted.fetch_add(1, Ordering::SeqCst);
    };
    let client = leases::connect(PgLockClient::builder().on_release_error(count), &schema.url());
    let mut observer = schema.client();
    for (flavour, runtime) in runtimes() {
        let [a, b] = keys(flavour);
        let (dropped, released) = (client.lock(&a).unwrap(), client.lock(&b).unwrap());
        let error = run(&runtime, move || {
            drop(dropped);
            released.release().unwrap_err()
        });
        assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error:?}");
        assert!(error.to_string().contains("spawn_blocking"), "{error}");
        // The worker does both: the one was handed over, the other one's release had failed.
        wait_until_released(&mut observer, &a);
        wait_until_released(&mut observer, &b);
    }
    assert!(client.close(LIMIT).unwrap().is_clean());
    assert_eq!(failures.load(Ordering::SeqCst), 0, "handing over is no failure");
}

#[test]
fn a_guard_that_is_dropped_by_a_panicking_task_lets_go() {
    let _alone = crate::support::alone();
    let schema = crate::support::schema();
    let client = client(&schema);
    for (flavour, runtime) in runtimes() {
        let [key, _] = keys(flavour);
        let guard = client.lock(&key).unwrap();
        let task = async move {
            let _guard = guard;
            std::panic::resume_unwind(Box::new("a panic of the task's"));
        };
        let ended = runtime.block_on(async { tokio::spawn(task).await });
        let panic = ended.map(|(): ()| ()).unwrap_err().into_panic();
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"a panic of the task's"));
        wait_until_released(&mut schema.client(), &key);
    }
}

#[test]
fn a_runtime_that_shuts_down_lets_go_of_what_its_tasks_hold() {
    let _alone = crate::support::alone();
    let schema = crate::support::schema();
    let client = client(&schema);
    for (flavour, runtime) in runtimes() {
        let [key, _] = keys(flavour);
        let guard = client.lock(&key).unwrap();
        runtime.block_on(async move {
            tokio::spawn(async move {
                let _guard = guard;
                std::future::pending::<()>().await;
            });
            tokio::task::yield_now().await;
        });
        drop(runtime);
        wait_until_released(&mut schema.client(), &key);
    }
}

/// A client with open connections, on our own pool or on a caller's.
fn busy_client(schema: &TestSchema, app: &str, callers: bool) -> PgLockClient {
    let url = named(&schema.url(), app);
    let client = if callers {
        let manager = PostgresConnectionManager::new(url.parse().unwrap(), postgres::NoTls);
        PgLockClient::builder().build(r2d2::Pool::builder().max_size(3).build(manager).unwrap()).unwrap()
    } else {
        PgLockClient::connect(&url).unwrap()
    };
    let _ = client.acquire("warm", TTL).unwrap();
    client
}

#[test]
fn the_last_clone_may_be_dropped_in_a_runtime() {
    let _alone = crate::support::alone();
    let schema = crate::support::schema();
    let mut observer = schema.client();
    for (flavour, runtime) in runtimes() {
        for (what, threads) in [("idle", false), ("with threads", true)] {
            let app = format!("{flavour}-{}-{threads}", schema.name());
            let client = busy_client(&schema, &app, false);
            let guard = threads.then(|| client.lock("k").unwrap());
            assert!(sessions(&mut observer, &app) >= 1);
            run(&runtime, move || {
                drop(client);
                drop(guard);
            });
            wait_until(LIMIT, &format!("{what}: its connections are closed"), || {
                sessions(&mut observer, &app) == 0
            });
            wait_until_released(&mut observer, "k");
        }
    }
}

#[test]
fn a_client_on_a_callers_pool_may_be_closed_and_dropped_in_a_runtime() {
    let _alone = crate::support::alone();
    let schema = crate::support::schema();
    let mut observer = schema.client();
    for (flavour, runtime) in runtimes() {
        let app = format!("pool-{flavour}-{}", schema.name());
        let client = busy_client(&schema, &app, true);
        let guard = client.lock("k").unwrap();
        run(&runtime, move || {
            drop(guard);
            assert!(client.close(LIMIT).unwrap().is_clean());
            drop(client);
        });
        wait_until_released(&mut observer, "k");
        wait_until(LIMIT, "its connections are closed", || sessions(&mut observer, &app) == 0);
    }
}

#[test]
fn the_last_of_a_callers_pool_may_be_dropped_in_a_runtime() {
    let _alone = crate::support::alone();
    let schema = crate::support::schema();
    let mut observer = schema.client();
    for (flavour, runtime) in runtimes() {
        let app = format!("last-{flavour}-{}", schema.name());
        // The client's threads are gone; what is left is the view of the operator.
        let operator = {
            let client = busy_client(&schema, &app, true);
            client.operator()
        };
        assert!(operator.counts().is_ok());
        run(&runtime, move || drop(operator));
        wait_until(LIMIT, "its connections are closed", || sessions(&mut observer, &app) == 0);
    }
}

#[test]
fn a_runtime_thread_beside_it_does_not_disturb_an_ordinary_one() {
    let _alone = crate::support::alone();
    let schema = crate::support::schema();
    let client = client(&schema);
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(async {
        let thread = thread::spawn(move || client.lock("k").unwrap().release().unwrap());
        assert_eq!(thread.join().unwrap(), ReleaseResult::Released);
    });
}

/// The names of this process's threads, as far as the system shows them.
fn threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let name = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).ok();
    tasks.filter_map(name).map(|name| name.trim().to_owned()).collect()
}

/// In a process of its own, where no other test has threads.
#[test]
#[cfg(target_os = "linux")]
fn without_telemetry_no_thread_runs_for_it_and_with_it_one_from_the_first_event_on() {
    let _alone = crate::support::alone();
    worker::part("alone", |parent| {
        let telemetry = || threads().iter().filter(|name| name.starts_with("syncguard-telem")).count();
        let use_it = |client: &PgLockClient| {
            drop(client.lock("guarded").unwrap());
            let grant = client.acquire("k", TTL).unwrap().acquired().unwrap();
            assert!(client.acquire("k", TTL).unwrap().acquired().is_none());
            client.is_locked("k").unwrap();
            client.lookup(Lookup::Key("k")).unwrap();
            let _ = client.extend(&grant.lock_id, TTL).unwrap();
            client.release(&grant.lock_id).unwrap();
        };
        let plain = PgLockClient::connect(&parent.arg("url")).unwrap();
        use_it(&plain);
        parent.say(&format!("{} without", telemetry()));
        let builder = PgLockClient::builder().telemetry(syncguard::TelemetryOptions::new(|_| ()));
        // Counted without their names: a thread has none yet when it begins.
        let before = threads().len();
        let reported = builder.connect(&parent.arg("url")).unwrap();
        // The pool of connections has one, whoever reports.
        parent.say(&format!("{} before an event", threads().len().saturating_sub(before + 1)));
        use_it(&reported);
        assert!(reported.telemetry().unwrap().flush(LIMIT));
        parent.say(&format!("{} after events", telemetry()));
        drop(reported);
        // The thread that is joined may show for a moment.
        wait_until(LIMIT, "the thread ends", || telemetry() == 0);
        parent.say("0 at the end");
    });
    let schema = crate::support::schema();
    let url = schema.url();
    let test = "without_telemetry_no_thread_runs_for_it_and_with_it_one_from_the_first_event_on";
    let mut worker = Worker::start(test, "alone", &[("url", &url)]);
    for expected in ["0 without", "0 before an event", "1 after events", "0 at the end"] {
        worker.expect(expected);
    }
}
