//! Beside sets, permits, leaders, runs and readers: who takes the plain key excludes all but permits, statement by statement.

use std::ops::ControlFlow::Break;

use super::*;
use crate::support::calls::{asking_often, either_form, ms};
use syncguard::{Heartbeat, LockOptions, RunOnce, Slot};

fn run(client: &PgLockClient, key: &str) -> RunOnce<(), ()> {
    client.run_once(key, Slot::number(7), &LockOptions::new(), |_run| Ok(())).unwrap()
}

#[test]
fn a_plain_key_of_the_other_client_blocks_a_set_an_election_and_a_run_and_no_permit() {
    let place = place();
    for n in 0..2 {
        let (key, free) = (place.key(&format!("k{n}")), place.key(&format!("free{n}")));
        let client = either_form(&place.named(&unique()), n);
        let theirs = id(&format!("theirs{n}"));
        let mut other = TheirAcquire::new(&place, &key, &theirs);
        assert!(other.acquire());
        assert!(client.try_lock_all(&[&free, &key]).unwrap().is_none());
        assert!(place.stored.row(&free).is_none() && place.stored.counter(&free).is_none(), "all or nothing");
        assert_eq!(run(&client, &key), RunOnce::Running);
        let permit = client.semaphore(&key, 1).unwrap().try_acquire().unwrap();
        assert!(permit.is_some_and(|permit| permit.is_held()), "a permit is another thing");
        // To us it leads, and the next term is ours.
        let leader = client.leader(&key).unwrap().expect("the other client leads");
        assert_eq!(leader.term.get().cast_signed(), other.fence);
        let (candidate, named) = (client.clone(), key.clone());
        let call = Call::start("unnamed", move || {
            candidate.elect(&named, &asking_often(), |term| Break(term.number().get())).unwrap()
        });
        assert!(other_client::release(&mut place.schema.client(), &theirs));
        assert_eq!(call.join().cast_signed(), other.fence + 1);
    }
}

#[test]
fn a_set_a_leader_and_a_run_block_the_other_client_and_a_permit_does_not() {
    let place = place();
    for n in 0..2 {
        let (a, b) = (place.key(&format!("a{n}")), place.key(&format!("b{n}")));
        let client = either_form(&place.client, n);
        let gets = |key: &str| TheirAcquire::new(&place, key, &id("theirs")).acquire();
        let set = client.lock_all(&[&a, &b]).unwrap();
        assert!(!gets(&a) && !gets(&b));
        set.release().unwrap();
        let led = client.elect(&a, &LockOptions::new(), |_term| Break(gets(&a))).unwrap();
        assert!(!led, "whoever leads has the key");
        let ran = client.run_once(&b, Slot::number(7), &LockOptions::new(), |_run| Ok::<_, ()>(gets(&b)));
        assert_eq!(ran.unwrap(), RunOnce::Done(false));
        let semaphore = client.semaphore(&a, 1).unwrap();
        let permit = semaphore.acquire().unwrap();
        assert!(gets(&a), "a permit is another thing");
        assert!(permit.is_held() && semaphore.in_use().unwrap() == 1);
        assert!(other_client::release(&mut place.schema.client(), &id("theirs")));
    }
}

/// Ours come between any two statements of the other client's acquire.
#[test]
fn a_set_or_a_run_between_any_two_statements_of_an_acquire_excludes_it_or_is_excluded() {
    let place = place();
    for (n, (before, runs)) in (0..=STEPS).flat_map(|n| [(n, false), (n, true)]).enumerate() {
        for form in 0..2 {
            let (key, also) = (place.key(&format!("k{n}-{form}")), place.key(&format!("z{n}-{form}")));
            let theirs = id(&format!("theirs{n}x{form}"));
            let mut other = TheirAcquire::new(&place, &key, &theirs);
            (0..before).for_each(|step| other.step(step));
            let app = unique();
            let client = either_form(&place.named(&app), form);
            let (ours, with) = (key.clone(), also.clone());
            let call = Call::start(&app, move || {
                if runs {
                    return run(&client, &ours) == RunOnce::Done(());
                }
                let set = client.try_lock_all(&[&ours, &with]).unwrap();
                let held = set.is_some();
                std::mem::forget(set);
                held
            });
            let waits = call.settle(&place.stored);
            (before..STEPS).for_each(|step| other.step(step));
            let granted = call.join();
            // Before it has the advisory lock of the key, ours are first; a run is over by then.
            let first = before < 2;
            assert_eq!(
                (granted, other.won),
                (first, !first || runs),
                "{before} {runs} {form}, waits: {waits}"
            );
            let row = place.stored.row(&key).expect("held by one of them");
            assert_eq!(row.lock_id == theirs, other.won);
            assert_eq!(place.stored.row(&also).is_some(), granted && !runs, "all or nothing");
            let fences = if granted && other.won { 2 } else { 1 };
            assert_eq!(place.stored.counter(&key), Some(fences), "one fence for each grant");
        }
    }
}

/// A reader joins a group in its last moments, and its commit takes so long that the other client finds it over.
#[test]
fn a_group_that_is_joined_late_is_not_trusted_beside_who_read_its_old_end() {
    let place = place();
    let key = place.key("prices");
    let abandoned = LockOptions::new().ttl(ms(3000)).heartbeat(Heartbeat::Off);
    let _ = place.client.read_lock_with(&key, &abandoned).unwrap().leak();
    // The commit of whoever joins waits for the gate.
    place.stored.run(
        "CREATE FUNCTION stay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
           PERFORM pg_advisory_xact_lock(hashtext(current_schema())); RETURN NULL; END $$; \
         CREATE CONSTRAINT TRIGGER stay AFTER INSERT ON syncguard_members DEFERRABLE INITIALLY DEFERRED \
           FOR EACH ROW EXECUTE FUNCTION stay()",
    );
    let mut gate = place.schema.client();
    let mut gate = gate.transaction().unwrap();
    gate.execute("SELECT pg_advisory_xact_lock(hashtext(current_schema()))", &[]).unwrap();
    let app = unique();
    let call = {
        let (client, key) = (place.named(&app), key.clone());
        Call::start(&app, move || client.try_read_lock(&key).unwrap())
    };
    call.wait_until_blocked(&place.stored);
    let over = place.stored.row(&key).unwrap().expires_at_ms + 1000;
    place.wait_for(over + 1);
    let mut other = TheirAcquire::new(&place, &key, &id("theirs"));
    (0..4).for_each(|step| other.step(step));
    assert!(other.go, "it has found the group over");
    gate.commit().unwrap();
    let waits = call.settle(&place.stored);
    (4..STEPS).for_each(|step| other.step(step));
    let reader = call.join();
    assert!(other.won && waits && reader.is_none(), "a reader trusts its lease beside the other client");
    // With all of its time left a group is joined at once, and the other client finds it held.
    assert!(other_client::release(&mut place.schema.client(), &id("theirs")));
    place.stored.run("DROP TRIGGER stay ON syncguard_members");
    let _reader = place.client.read_lock(&key).unwrap();
    assert!(!TheirAcquire::new(&place, &key, &id("again")).acquire());
}

/// A reader comes or goes between any two statements of the other client's acquire.
#[test]
fn a_reader_between_any_two_statements_of_an_acquire_excludes_it_or_is_excluded() {
    let place = place();
    place.client.read_lock(&place.key("warm")).unwrap().release().unwrap();
    for (n, (before, leaves)) in (0..=STEPS).flat_map(|n| [(n, false), (n, true)]).enumerate() {
        for form in 0..2 {
            let key = place.key(&format!("r{n}-{form}"));
            let theirs = id(&format!("theirs{n}y{form}"));
            let there = leaves.then(|| place.client.read_lock(&key).unwrap());
            let mut other = TheirAcquire::new(&place, &key, &theirs);
            (0..before).for_each(|step| other.step(step));
            let app = unique();
            let client = either_form(&place.named(&app), form);
            let call = {
                let key = key.clone();
                Call::start(&app, move || match there {
                    Some(reader) => {
                        reader.release().unwrap();
                        None
                    }
                    None => client.try_read_lock(&key).unwrap(),
                })
            };
            let _ = call.settle(&place.stored);
            (before..STEPS).for_each(|step| other.step(step));
            let reader = call.join();
            assert!(
                leaves || other.won != reader.is_some(),
                "before step {before}, form {form}: the other client {}, the reader {}",
                other.won,
                reader.is_some()
            );
            if other.won {
                assert!(place.client.try_read_lock(&key).unwrap().is_none());
                assert!(other_client::release(&mut place.schema.client(), &theirs));
            }
        }
    }
}
