//! What it costs the server that many sessions hear of each new leader: measured, for docs/election.md.

use std::ops::ControlFlow::{Break, Continue};
use std::time::{Duration, Instant};

use postgres::Client;
use postgres::fallible_iterator::FallibleIterator as _;
use syncguard::{LockOptions, PgLockClient};

use crate::support::{Config, LIMIT, Server, wait_until};

const HEAR: &str = "LISTEN scheduler";

/// What the leader does first in each term.
fn announce(sql: &mut Client, term: u64) {
    let payload = term.to_string();
    sql.execute("SELECT pg_notify('scheduler', $1)", &[&payload]).unwrap();
}

/// The transactions of the server, those that ask excluded.
fn transactions(sql: &mut Client) -> i64 {
    let sum = "SELECT (xact_commit + xact_rollback) FROM pg_stat_database WHERE datname = 'postgres'";
    sql.query_one(sum, &[]).unwrap().get(0)
}

/// How many transactions the server had in this time.
fn count(sql: &mut Client, time: Duration) -> i64 {
    // Sessions hand in their counts once a second.
    std::thread::sleep(Duration::from_secs(2));
    let before = transactions(sql);
    std::thread::sleep(time);
    transactions(sql) - before
}

/// As many as `SYNCGUARD_OBSERVERS` says: 20 by default.
#[test]
fn observers_hear_of_each_leader_and_ask_nothing() {
    let observers: usize = std::env::var("SYNCGUARD_OBSERVERS").map_or(20, |n| n.parse().expect("a number"));
    let window = Duration::from_secs(if observers > 100 { 10 } else { 1 });
    let server = Server::start(&Config::new().set("max_connections", &(observers + 20).to_string()));
    let (client, mut sql) = (PgLockClient::connect(server.url()).unwrap(), server.client());
    let mut leader = server.client();
    let options = LockOptions::new().ttl(Duration::from_secs(10));
    let mut listening: Vec<Client> = Vec::new();
    let (mut terms, mut alone) = (0, 0);
    let led = client.elect("scheduler", &options, |term| {
        announce(&mut leader, term.number().get());
        terms += 1;
        if terms == 1 {
            alone = count(&mut sql, window);
            listening.extend((0..observers).map(|_| {
                let mut observer = server.client();
                observer.batch_execute(HEAR).unwrap();
                observer
            }));
            let watched = count(&mut sql, window);
            let seconds = window.as_secs();
            println!(
                "{observers} observers: {watched} transactions in {seconds} s on the server, {alone} without them"
            );
            return Continue(());
        }
        let said = Instant::now();
        for observer in &mut listening {
            let mut notifications = observer.notifications();
            let heard = notifications.timeout_iter(LIMIT).next().unwrap().expect("it is told");
            assert_eq!(heard.payload(), term.number().get().to_string());
        }
        let all = said.elapsed().as_millis();
        println!("all {observers} had read it, one after the other, {all} ms after it was said");
        Break(())
    });
    led.unwrap();
    drop(listening);
    wait_until(LIMIT, "nobody leads", || client.leader("scheduler").unwrap().is_none());
}
