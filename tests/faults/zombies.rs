//! The bytes of a connection that its client has given up arrive late: what they do then must not
//! contradict what anybody was told meanwhile.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use postgres::NoTls;
use syncguard::{ExtendResult, Heartbeat, LockGuard, LockOptions, LostReason, PgLockClient};

use crate::safeguards::without;
use crate::support::bouncer::Bouncer;
use crate::support::role::Role;
use crate::support::{self, Action, LIMIT, Proxy, wait_until};
use crate::truth::Bench;

const TTL: Duration = Duration::from_secs(30);

/// Lets the held-back query arrive, and waits until the server has answered it or had hung up.
fn walk(bench: &Bench) {
    bench.proxy.open_gate();
    wait_until(LIMIT, "the late query is over", || bench.proxy.zombies_over() >= bench.proxy.count());
}

/// Where a message is late: what the server shows of its sessions, and who carries it, must not matter.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Around {
    Nothing,
    /// The server shows nobody what its sessions do.
    NoActivities,
    /// Sessions run as another role than the one that logged in.
    AnotherRole,
    /// The first connection that is made after the loss is refused.
    ARefusal,
    /// PgBouncer in transaction mode.
    APooler,
}

const AROUND: [Around; 5] =
    [Around::Nothing, Around::NoActivities, Around::AnotherRole, Around::ARefusal, Around::APooler];

/// A bench, and what has to live as long.
struct Scene {
    bench: Bench,
    around: Around,
    _roles: Vec<Role>,
    _bouncer: Option<Bouncer>,
}

impl Scene {
    fn new(around: Around) -> Self {
        let schema = support::schema();
        // One server connection: on another the late message would find its statements not prepared.
        let one = [("ignore_startup_parameters", "extra_float_digits,options"), ("default_pool_size", "1")];
        let bouncer = (around == Around::APooler).then(|| Bouncer::start(&one));
        let proxy = Proxy::start(bouncer.as_ref().map_or(support::server().port(), Bouncer::port));
        let mut config = match &bouncer {
            Some(bouncer) => bouncer.url().parse().unwrap(),
            None => schema.config(),
        };
        let mut roles = Vec::new();
        match around {
            Around::NoActivities => {
                config.options(&format!("-c search_path={} -c track_activities=off", schema.name()));
            }
            Around::AnotherRole => {
                let (app, login) = (Role::new(&schema), Role::new(&schema));
                let member = format!("GRANT {} TO {}", app.name(), login.name());
                schema.client().batch_execute(&member).unwrap();
                login.set(&schema, "role", app.name());
                config.user(login.name());
                roles.extend([login, app]);
            }
            Around::Nothing | Around::ARefusal | Around::APooler => {}
        }
        let mut through = postgres::Config::new();
        through.user(config.get_user().unwrap_or("postgres")).dbname("postgres");
        through.host("127.0.0.1").port(proxy.port());
        if let Some(options) = config.get_options() {
            through.options(options);
        }
        let client = PgLockClient::builder()
            .schema(schema.name())
            .operation_timeout(Duration::from_secs(5))
            .connect_with(through, NoTls)
            .unwrap();
        client.setup_schema().unwrap();
        let sql = schema.client();
        let bench = Bench { schema, proxy, client, sql };
        for _ in 0..3 {
            drop(bench.client.lock("warm").unwrap());
        }
        Self { bench, around, _roles: roles, _bouncer: bouncer }
    }

    /// Holds back the next message that calls this statement, after `spared` others.
    fn hold_back(&self, name: &'static str, mut spared: u32) {
        if self.around == Around::ARefusal {
            self.bench.proxy.refuse_after_it(1);
        }
        let mut held = false;
        self.bench.proxy.on_query(move |sql| {
            if held || !calls(name, sql) {
                return Action::Pass;
            }
            if spared > 0 {
                spared -= 1;
                return Action::Pass;
            }
            held = true;
            Action::Zombie(None)
        });
    }

    /// What was held back arrives. The row must not end before what its holder was told.
    #[track_caller]
    fn ends_no_earlier(&mut self, told: i64) {
        walk(&self.bench);
        assert_eq!(self.bench.proxy.count(), 1, "{:?}: a message was held back", self.around);
        assert_eq!(self.bench.proxy.late_error(), None, "{:?}: it is carried out", self.around);
        assert!(self.bench.proxy.has_refused(), "{:?}", self.around);
        let (_, end, _) = self.bench.row("k").expect("it is held");
        assert!(
            end >= told,
            "{:?}: the lease ends {} ms before what its holder was told",
            self.around,
            told - end
        );
    }
}

/// Whether a message calls the statement: by its name, or written out.
pub fn calls(name: &str, sql: &str) -> bool {
    let written_out = match name {
        "sg_extend" => "LEFT JOIN u ON true",
        "sg_renew" => "WITH ORDINALITY AS want",
        "sg_acquire" => "pg_try_advisory_xact_lock",
        _ => "no statement",
    };
    !sql.contains("PREPARE") && (sql.contains(&format!("EXECUTE {name}")) || sql.contains(written_out))
}

fn extended(result: syncguard::Result<ExtendResult>) -> i64 {
    let ExtendResult::Extended { expires_at_ms } = result.unwrap() else { panic!("it is held") };
    expires_at_ms
}

fn unrenewed(bench: &Bench) -> LockGuard {
    let options = LockOptions::new().ttl(TTL).heartbeat(Heartbeat::Off);
    bench.client.lock_with("k", &options).unwrap()
}

#[test]
fn a_late_extend_does_not_cut_short_what_a_later_one_was_told() {
    for around in AROUND {
        let mut scene = Scene::new(around);
        let guard = unrenewed(&scene.bench);
        scene.hold_back("sg_extend", 0);
        extended(guard.extend(Duration::from_secs(1)));
        let told = extended(guard.extend(TTL));
        assert!(guard.remaining() > TTL / 2, "{around:?}");
        scene.ends_no_earlier(told);
    }
}

#[test]
fn a_late_extend_by_the_lock_id_does_not_cut_short_what_a_later_one_was_told() {
    for around in AROUND {
        // Its first message only lengthens, its second one shortens.
        for spared in [0, 1] {
            let mut scene = Scene::new(around);
            let granted = scene.bench.client.acquire("k", TTL).unwrap().acquired().unwrap();
            scene.hold_back("sg_extend", spared);
            let shorter = extended(scene.bench.client.extend(&granted.lock_id, Duration::from_secs(1)));
            assert!(shorter < granted.expires_at_ms, "{around:?}: it is shortened all the same");
            let told = extended(scene.bench.client.extend(&granted.lock_id, TTL));
            scene.ends_no_earlier(told);
        }
    }
}

/// A client that reads without a lock may have read the row before the first message was carried out.
#[test]
fn an_extend_by_the_lock_id_queues_for_the_key_after_a_lost_answer() {
    let scene = Scene::new(Around::Nothing);
    let granted = scene.bench.client.acquire("k", TTL).unwrap().acquired().unwrap();
    let queued = Arc::new(AtomicBool::new(false));
    let (seen, mut cut) = (Arc::clone(&queued), false);
    scene.bench.proxy.on_query(move |sql| {
        seen.fetch_or(sql.contains("EXECUTE sg_queue_for"), Ordering::SeqCst);
        if cut || !calls("sg_extend", sql) {
            return Action::Pass;
        }
        cut = true;
        Action::CutAnswerAt(0)
    });
    extended(scene.bench.client.extend(&granted.lock_id, TTL));
    assert!(queued.load(Ordering::SeqCst));
}

/// A guard whose renewal is held back: another one and a longer extend are confirmed. What that one was
/// told, and the guard.
fn with_a_late_renewal(scene: &Scene) -> (i64, LockGuard) {
    let every = Heartbeat::Every(Duration::from_millis(100));
    let options = LockOptions::new().ttl(Duration::from_secs(2)).heartbeat(every);
    let guard = scene.bench.client.lock_with("k", &options).unwrap();
    scene.hold_back("sg_renew", 0);
    wait_until(LIMIT, "a renewal is held back", || scene.bench.proxy.count() == 1);
    let first = guard.expires_at_ms();
    wait_until(LIMIT, "a later one is confirmed", || guard.expires_at_ms() > first);
    (extended(guard.extend(TTL)), guard)
}

#[test]
fn a_late_renewal_does_not_cut_short_what_a_later_extend_was_told() {
    for around in AROUND {
        // The next renewal would mend what a late copy does: there is none, or the guard lives on.
        for leaked in [true, false] {
            let mut scene = Scene::new(around);
            let (told, guard) = with_a_late_renewal(&scene);
            let guard = if leaked {
                drop(guard.leak());
                None
            } else {
                Some(guard)
            };
            scene.ends_no_earlier(told);
            assert!(guard.is_none_or(|guard| guard.is_held()), "{around:?}");
        }
    }
}

#[test]
fn without_the_version_a_late_renewal_cuts_the_lease_short() {
    let mut scene = Scene::new(Around::Nothing);
    scene.bench.proxy.rewrite(|said| without("version", said));
    scene.bench.proxy.cut_all();
    let (told, guard) = with_a_late_renewal(&scene);
    drop(guard.leak());
    walk(&scene.bench);
    let (_, end, _) = scene.bench.row("k").expect("it is held");
    assert!(end < told - 20_000, "nothing came late");
}

/// The control: without the version the row ends a second after the late copy arrives.
#[test]
fn without_the_version_a_late_extend_cuts_the_lease_short() {
    let mut scene = Scene::new(Around::Nothing);
    scene.bench.proxy.rewrite(|said| without("version", said));
    scene.bench.proxy.cut_all();
    let guard = unrenewed(&scene.bench);
    scene.hold_back("sg_extend", 0);
    extended(guard.extend(Duration::from_secs(1)));
    let told = extended(guard.extend(TTL));
    walk(&scene.bench);
    let (_, end, _) = scene.bench.row("k").expect("it is held");
    assert!(end < told - 20_000, "nothing came late");
}

#[test]
fn a_guard_whose_lock_was_broken_and_granted_again_by_a_late_acquire_is_lost() {
    for around in AROUND {
        for renewed in [false, true] {
            // A key of its own: its number is locked by nobody at that moment.
            let (mut scene, key) = (Scene::new(around), support::unique());
            let every = Heartbeat::Every(Duration::from_millis(200));
            let options = LockOptions::new().ttl(TTL).heartbeat(if renewed { every } else { Heartbeat::Off });
            scene.hold_back("sg_acquire", 0);
            let guard = scene.bench.client.lock_with(&key, &options).unwrap();
            scene.bench.proxy.pass_all();
            let Scene { bench, .. } = &mut scene;
            bench.client.operator().break_lock(&key, "test").unwrap();
            // A renewal may be quicker than the copy, and says then that the row is gone.
            walk(bench);
            assert_eq!(bench.proxy.late_error(), None, "{around:?}: the late copy is carried out");
            let (id, _, fence) = bench.row(&key).expect("the late copy is granted");
            assert_eq!((id.as_str(), fence.as_str()), (guard.lock_id(), "000000000000003"), "{around:?}");
            if renewed {
                assert!(guard.lost().wait_timeout(LIMIT), "{around:?}");
            } else {
                assert_eq!(guard.extend(TTL).unwrap(), ExtendResult::NotHeld, "{around:?}");
                let newer = LostReason::TakenOver { fence: syncguard::Fence::new(3).unwrap() };
                assert_eq!(guard.lost_reason(), Some(newer), "{around:?}");
            }
            assert!(!guard.is_held(), "{around:?}");
            drop(guard);
            assert_eq!(bench.row(&key), None, "{around:?}: whoever had the id lets go of it");
        }
    }
}

/// What is left: a lease that nobody trusts, for its ttl, with a fence that is newer than all before.
#[test]
fn a_late_acquire_after_everything_was_released_leaves_a_lease_for_its_ttl() {
    let (mut bench, key) = (Bench::new(Duration::from_secs(5)), support::unique());
    let ttl = Duration::from_secs(1);
    bench.client.is_locked("warm").unwrap();
    bench.proxy.once("EXECUTE sg_acquire", Action::Zombie(None));
    let granted = bench.client.acquire(&key, ttl).unwrap().acquired().expect("nobody else is there");
    bench.client.release(&granted.lock_id).unwrap();
    walk(&bench);
    let (id, _, fence) = bench.row(&key).expect("it is granted once more");
    assert_eq!((id, fence.as_str()), (granted.lock_id, "000000000000002"));
    let options = LockOptions::new().ttl(ttl).timeout(LIMIT);
    assert_eq!(bench.client.lock_with(&key, &options).unwrap().fence().get(), 3);
}

#[test]
fn a_late_release_finds_nothing() {
    let mut bench = Bench::new(Duration::from_secs(5));
    let granted = bench.client.acquire("k", TTL).unwrap().acquired().unwrap();
    bench.proxy.once("EXECUTE sg_release", Action::Zombie(None));
    bench.client.release(&granted.lock_id).unwrap();
    let next = bench.client.acquire("k", TTL).unwrap().acquired().expect("it was released");
    walk(&bench);
    assert_eq!(bench.row("k").map(|row| row.0), Some(next.lock_id));
}

/// The same for messages of the driver's own protocol.
#[test]
fn late_calls_of_statements_that_are_called_often_change_nothing() {
    let mut bench = Bench::new(Duration::from_secs(5));
    bench.settle();
    bench.once_bound("EXECUTE sg_acquire", Action::Zombie(None));
    let first = bench.client.acquire("k", TTL).unwrap().acquired().expect("nobody else is there");
    bench.client.release(&first.lock_id).unwrap();

    bench.settle();
    let second = bench.client.acquire("k", TTL).unwrap().acquired().expect("it was released");
    bench.once_bound("EXECUTE sg_extend", Action::Zombie(None));
    let _ = bench.client.extend(&second.lock_id, Duration::from_secs(1)).unwrap();
    let told = bench.client.extend(&second.lock_id, TTL).unwrap();
    let ExtendResult::Extended { expires_at_ms } = told else { panic!("it is held") };
    assert_eq!(bench.proxy.count(), 2, "both calls were held back");
    walk(&bench);
    let (id, in_the_row, _) = bench.row("k").expect("it is held");
    assert_eq!((id, bench.counter("k")), (second.lock_id, 2));
    assert!(in_the_row >= expires_at_ms, "the lease ends {} ms too early", expires_at_ms - in_the_row);
}
