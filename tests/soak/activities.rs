//! What the threads of the load do. The set of keys is fixed: each has a counter, which stays forever, and no new ones come.

use std::convert::Infallible;
use std::ops::ControlFlow::Break;
use std::thread;
use std::time::{Duration, Instant};

use postgres::NoTls;
use syncguard::{
    AcquireResult, AdvisoryKey, AdvisoryOptions, CancelToken, ErrorCode, LockError, LockGuard, LockOptions,
    Lookup, RunOnce, Slot,
};

use crate::load::{Dice, Load, builder, named};

/// Name, pause between two of them, what is done. Each has a thread; what stands here twice has two.
type Activity = (&'static str, Duration, fn(&Load, &'static str, &mut Dice));

const fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

pub const ACTIVITIES: [Activity; 19] = [
    ("lock, work, let go", ms(120), plain),
    ("lock of a key that others want", ms(40), hot),
    ("lock of a key that others want", ms(40), hot),
    ("lock of a key that others want", ms(40), hot),
    ("100 guards renewed for 10 s", ms(400), kept),
    ("acquire, extend, look, release", ms(160), operations),
    ("lock of three keys", ms(140), set),
    ("permit", ms(100), permit),
    ("permit", ms(100), permit),
    ("election", ms(100), campaign),
    ("election", ms(100), campaign),
    ("run once per slot", ms(300), job),
    ("read lock", ms(120), reader),
    ("read lock", ms(120), reader),
    ("session lock", ms(120), session),
    ("session lock", ms(120), session),
    ("fenced transaction", ms(240), fenced),
    ("wait that a token or its time ends", ms(200), ended_wait),
    ("client made, used and closed", ms(3000), whole_client),
];

const TTL: Duration = Duration::from_secs(3);

fn options() -> LockOptions {
    LockOptions::new().ttl(TTL).timeout(Duration::from_secs(1))
}

/// Half of them is let go with an answer, half by a drop.
fn let_go(guard: LockGuard, dice: &mut Dice) -> Result<(), LockError> {
    if dice.below(2) == 0 {
        return guard.release().map(drop);
    }
    drop(guard);
    Ok(())
}

fn plain(load: &Load, name: &'static str, dice: &mut Dice) {
    let key = format!("plain{}", dice.below(400));
    let locked = load.client(dice).lock_with(&key, &options());
    load.note(
        name,
        &locked.and_then(|guard| {
            thread::sleep(dice.ms(10));
            let_go(guard, dice)
        }),
    );
}

fn hot(load: &Load, name: &'static str, dice: &mut Dice) {
    let locked = load.client(dice).lock_with("hot", &options());
    load.note(
        name,
        &locked.and_then(|guard| {
            thread::sleep(dice.ms(60));
            let_go(guard, dice)
        }),
    );
}

fn kept(load: &Load, name: &'static str, dice: &mut Dice) {
    let client = load.client(dice);
    let guards: Result<Vec<_>, _> =
        (0..100).map(|n| client.lock_with(&format!("kept{n}"), &options().wake_ups(n % 2 == 0))).collect();
    load.note(
        name,
        &guards.map(|guards| {
            let _ = load.over.wait_timeout(Duration::from_secs(10));
            drop(guards);
        }),
    );
}

fn operations(load: &Load, name: &'static str, dice: &mut Dice) {
    let (client, key) = (load.client(dice), format!("operations{}", dice.below(50)));
    let all = || {
        let AcquireResult::Acquired(acquired) = client.acquire(&key, TTL)? else { return Ok(()) };
        let _ = client.extend(&acquired.lock_id, TTL * 2)?;
        client.is_locked(&key)?;
        client.lookup(Lookup::LockId(&acquired.lock_id))?;
        client.operator().holders(10)?;
        client.release(&acquired.lock_id).map(drop)
    };
    load.note(name, &all());
    // What an operator's job does now and then.
    if dice.below(100) == 0 {
        load.note("cleanup", &client.operator().cleanup_expired(1000));
    }
}

fn set(load: &Load, name: &'static str, dice: &mut Dice) {
    let keys: Vec<_> = (0..3).map(|_| format!("set{}", dice.below(12))).collect();
    let locked = load.client(dice).lock_all_with(&keys, &options());
    load.note(
        name,
        &locked.and_then(|guard| {
            thread::sleep(dice.ms(20));
            guard.release().map(drop)
        }),
    );
}

fn permit(load: &Load, name: &'static str, dice: &mut Dice) {
    let permit =
        load.client(dice).semaphore("permits", 2).and_then(|semaphore| semaphore.acquire_with(&options()));
    load.note(
        name,
        &permit.and_then(|guard| {
            thread::sleep(dice.ms(40));
            let_go(guard, dice)
        }),
    );
}

fn campaign(load: &Load, name: &'static str, dice: &mut Dice) {
    let time = ms(200) + dice.ms(800);
    let options = options().cancel(&load.over);
    let led = load.client(dice).elect("leader", &options, |term| {
        let end = Instant::now() + time;
        while term.is_held() && Instant::now() < end && !load.over.is_cancelled() {
            let _ = term.lost().wait_timeout(ms(50));
        }
        Break(())
    });
    if !load.over.is_cancelled() {
        load.note(name, &led.and_then(|()| load.client(dice).leader("leader")));
    }
}

fn job(load: &Load, name: &'static str, dice: &mut Dice) {
    let ran = load.client(dice).run_once("job", Slot::every(ms(500)), &options(), |_run| {
        thread::sleep(ms(20));
        Ok::<_, Infallible>(())
    });
    match ran {
        Ok(RunOnce::Done(())) => load.note(name, &Ok(())),
        Ok(_) => load.note("run once: done by somebody else", &Ok(())),
        Err(error) => load.note(name, &Err::<(), _>(error)),
    }
}

fn reader(load: &Load, name: &'static str, dice: &mut Dice) {
    let (client, key) = (load.client(dice), format!("document{}", dice.below(5)));
    if dice.below(8) == 0 {
        let written = client.lock_with(&key, &options()).and_then(|guard| let_go(guard, dice));
        load.note("write lock beside readers", &written);
        return;
    }
    let read = client.read_lock_with(&key, &options());
    load.note(
        name,
        &read.and_then(|guard| {
            thread::sleep(dice.ms(40));
            let_go(guard, dice)
        }),
    );
}

fn session(load: &Load, name: &'static str, dice: &mut Dice) {
    let key = AdvisoryKey::from_text(&format!("session{}", dice.below(4)));
    let options = AdvisoryOptions::new().timeout(Duration::from_secs(1));
    let options = if dice.below(2) == 0 { options.shared() } else { options };
    let locked = load.client(dice).advisory_lock_with(&key, &options);
    load.note(
        name,
        &locked.and_then(|guard| {
            thread::sleep(dice.ms(60));
            if dice.below(2) == 0 { guard.release().map(drop) } else { Ok(()) }
        }),
    );
}

fn fenced(load: &Load, name: &'static str, dice: &mut Dice) {
    let key = format!("fenced{}", dice.below(20));
    let work = |guard: &LockGuard| {
        let mut sql = postgres::Client::connect(&named(&load.url, "work"), NoTls).ok()?;
        let mut transaction = sql.transaction().ok()?;
        guard.fence_transaction(&mut transaction).ok()?;
        transaction.commit().ok()
    };
    match load.client(dice).lock_with(&key, &options()) {
        Ok(guard) => {
            let worked = work(&guard);
            let name = if worked.is_some() { name } else { "fenced transaction: ended by the server" };
            load.note(name, &let_go(guard, dice));
        }
        Err(error) => load.note(name, &Err::<(), _>(error)),
    }
}

/// Waits for a key that is held: until a token fires, or its time is over.
fn ended_wait(load: &Load, name: &'static str, dice: &mut Dice) {
    let (client, key) = (load.client(dice), format!("ended{}", dice.below(10)));
    let guard = match client.lock_with(&key, &options()) {
        Ok(guard) => guard,
        Err(error) => return load.note(name, &Err::<(), _>(error)),
    };
    let (token, time) = (CancelToken::new(), ms(5) + dice.ms(60));
    let (other, by_token) = (load.client(dice), dice.below(2) == 0);
    let options = options().cancel(&token);
    let waited = thread::scope(|scope| {
        let options = if by_token { options.clone() } else { options.clone().timeout(time) };
        let waiter = scope.spawn(move || other.lock_with(&key, &options));
        thread::sleep(time);
        if by_token {
            token.cancel();
        }
        waiter.join().expect("a waiter does not panic")
    });
    drop(guard);
    let expected = if by_token { ErrorCode::Aborted } else { ErrorCode::AcquisitionTimeout };
    load.note(
        name,
        &match waited {
            Err(error) if error.code() == expected => Ok(()),
            other => other.map(drop),
        },
    );
}

fn whole_client(load: &Load, name: &'static str, dice: &mut Dice) {
    let used = builder().connect(&named(&load.url, "short")).and_then(|client| {
        let guards: Result<Vec<_>, _> =
            (0..3).map(|n| client.lock_with(&format!("short{n}"), &options())).collect();
        let guards = guards?;
        // Some are closed with their guards, some dropped after them.
        if dice.below(2) == 0 {
            client.close(Duration::from_secs(2)).map(drop)
        } else {
            drop(guards);
            Ok(())
        }
    });
    load.note(name, &used);
}
