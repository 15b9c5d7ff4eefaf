//! A process that has no file descriptor left: every call says which limit to raise, nothing
//! panics, and what could not be let go meanwhile is let go once descriptors are free again.

use std::fs::File;
use std::panic;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::support::leases::{connect, named, row, sessions, wait_until_released};
use crate::support::{LIMIT, Worker, wait_until, worker};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use syncguard::{AdvisoryKey, LockError, LockOptions, PgLockClient, ReleaseResult};

const NAME: &str = "no-descriptors";
/// Longer than the test: a row that goes has been released.
const TTL: Duration = Duration::from_secs(600);

/// Takes every descriptor that this process may have.
fn use_up() -> Vec<File> {
    let limit = Rlimit { current: Some(256), ..getrlimit(Resource::Nofile) };
    setrlimit(Resource::Nofile, limit).unwrap();
    std::iter::from_fn(|| File::open("/dev/null").ok()).collect()
}

/// In the process that runs out of descriptors.
fn starve(parent: &worker::Parent) {
    let url = parent.arg("url");
    let client = || {
        let builder = PgLockClient::builder().operation_timeout(Duration::from_secs(5));
        connect(builder.dispose_timeout(Duration::from_secs(1)), &url)
    };
    let options = LockOptions::new().ttl(TTL);
    let (client, closing) = (client(), client());
    let dropped = client.lock_with("dropped", &options).unwrap();
    let released = client.lock_with("released", &options).unwrap();
    let extended = client.lock_with("extended", &options).unwrap();
    let closed = closing.lock_with("closed", &options).unwrap();
    let session_lock = client.advisory_lock(&AdvisoryKey::from_text("no-descriptors-held")).unwrap();
    let panics = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&panics);
    panic::set_hook(Box::new(move |info| {
        seen.fetch_add(1, Ordering::SeqCst);
        eprintln!("{info}");
    }));
    parent.say("held");
    parent.hear();

    let mut all = use_up();
    let mut named_the_limit = |what: &str, error: Option<LockError>| {
        let said = error.map_or_else(|| "no error".to_owned(), |error| error.chain().to_string());
        let answer = if said.contains("ulimit -n") { "names the limit" } else { &said };
        parent.say(&format!("{what}: {answer}"));
        // The call has closed the connections that it found broken.
        all.extend(use_up());
    };
    named_the_limit("try_lock", client.try_lock("new").err());
    named_the_limit("lock", client.lock("new").err());
    named_the_limit("is_locked", client.is_locked("new").err());
    named_the_limit("extend", extended.extend(TTL).err());
    named_the_limit("session lock", client.try_advisory_lock(&AdvisoryKey::from_text("new")).err());
    named_the_limit("release", released.release().err());
    named_the_limit("the other client", closing.is_locked("new").err());
    drop(dropped);
    drop(session_lock);
    all.extend(use_up());
    let report = closing.close(Duration::from_millis(200)).unwrap();
    parent.say(&format!("close is clean: {}", report.is_clean()));
    parent.say(&format!("panics: {}", panics.load(Ordering::SeqCst)));
    parent.hear();

    drop(all);
    parent.say("free");
    parent.hear();
    drop(client.lock("new").unwrap());
    assert_eq!(extended.release().unwrap(), ReleaseResult::Released);
    let report = client.close(LIMIT).unwrap();
    parent.say(&format!("at the end: clean {}, panics {}", report.is_clean(), panics.load(Ordering::SeqCst)));
    drop(closed);
}

#[test]
fn without_descriptors_errors_name_the_limit_and_what_was_dropped_is_released_later() {
    worker::part("starve", starve);
    let _alone = crate::support::alone();
    let schema = crate::support::schema();
    let url = named(&schema.url(), NAME);
    let mut observer = schema.client();
    let test = "without_descriptors_errors_name_the_limit_and_what_was_dropped_is_released_later";
    let mut starved = Worker::start(test, "starve", &[("url", &url)]);
    starved.expect("held");
    // Every call needs a new connection from here on.
    let sql = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1";
    observer.execute(sql, &[&NAME]).unwrap();
    wait_until(LIMIT, "its sessions have ended", || sessions(&mut observer, NAME) == 0);
    starved.tell("go on");
    for call in ["try_lock", "lock", "is_locked", "extend", "session lock", "release", "the other client"] {
        starved.expect(&format!("{call}: names the limit"));
    }
    starved.expect("close is clean: false");
    starved.expect("panics: 0");
    for key in ["dropped", "released", "extended", "closed"] {
        assert!(row(&mut observer, key).is_some(), "{key} could not be released");
    }
    starved.tell("free them");
    starved.expect("free");
    for key in ["dropped", "released"] {
        wait_until_released(&mut observer, key);
    }
    starved.tell("end");
    starved.expect("at the end: clean true, panics 0");
    assert!(starved.join().success());
    assert_eq!(row(&mut observer, "extended"), None);
}
