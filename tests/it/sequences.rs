//! Random histories of a few clients on a few keys, played on PostgreSQL and on the backend in memory,
//! which is the contract in executable form. They must agree on everything.
//!
//! | variable | meaning |
//! | --- | --- |
//! | `SYNCGUARD_SEQUENCES` | how many histories; 10,000 by default |
//! | `SYNCGUARD_SEED` | play the histories of this seed, which a failure has named, and no others |
//!
//! A history that fails is shrunk to a short one. Nothing waits for time to pass: see `server`.

// A test that fails panics.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod kinds;
mod server;
mod steps;
mod world;

use std::cell::RefCell;
use std::env;
use std::hash::{BuildHasher, RandomState};

use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};

use crate::support::TestSchema;
use server::Tables;
use steps::{Form, Step};
use syncguard::PgLockClient;
use world::{Stop, World};

/// So many histories share a seed: few enough to play them again in seconds.
const PER_SEED: u32 = 100;

/// How often a history is played again whose steps took too long to prove anything.
const TRIES: u32 = 20;

#[test]
fn any_history_ends_as_the_model_says() {
    explore(sequences(), |stage, history| stage.play(history, None));
}

#[test]
fn one_message_and_two_decide_alike_in_any_history() {
    explore(sequences() / 5, |stage, history| {
        stage.play(history, Some(Form::One))?;
        stage.play(history, Some(Form::Two))
    });
}

/// Plays so many histories on two connections, in chunks that have a seed each.
fn explore(sequences: u32, play: impl Fn(&mut Stage, &[Step]) -> Result<(), TestCaseError> + Sync) {
    let seeds: Vec<u64> = if let Ok(seed) = env::var("SYNCGUARD_SEED") {
        vec![seed.parse().expect("SYNCGUARD_SEED is a number")]
    } else {
        let start = RandomState::new().hash_one("sequences") >> 16;
        (0..sequences.div_ceil(PER_SEED)).map(|n| start + u64::from(n)).collect()
    };
    let schemas = [crate::support::schema(), crate::support::schema()];
    std::thread::scope(|scope| {
        for (nth, schema) in schemas.iter().enumerate() {
            let (play, seeds, step) = (&play, &seeds, schemas.len());
            scope.spawn(move || {
                let stage = RefCell::new(Stage::new(schema));
                for seed in seeds.iter().skip(nth).step_by(step) {
                    stage.borrow_mut().tables.clear();
                    chunk(*seed, &stage, play);
                }
            });
        }
    });
}

fn chunk(
    seed: u64,
    stage: &RefCell<Stage>,
    play: &impl Fn(&mut Stage, &[Step]) -> Result<(), TestCaseError>,
) {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let config =
        Config { cases: PER_SEED, failure_persistence: None, max_shrink_iters: 2_000, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes));
    if let Err(failure) = runner.run(&steps::history(), |history| play(&mut stage.borrow_mut(), &history)) {
        panic!("{failure}\nto see it again: SYNCGUARD_SEED={seed} cargo test --test sequences");
    }
}

fn sequences() -> u32 {
    env::var("SYNCGUARD_SEQUENCES").map_or(10_000, |n| n.parse().expect("SYNCGUARD_SEQUENCES is a number"))
}

/// A client with one connection for its operations, and hands in its tables.
struct Stage {
    client: PgLockClient,
    tables: Tables,
    name: String,
    histories: u64,
}

impl Stage {
    fn new(schema: &TestSchema) -> Self {
        let client = PgLockClient::builder().max_connections(1).connect(&schema.socket_url()).unwrap();
        Self { client, tables: Tables::new(schema), name: schema.name().to_owned(), histories: 0 }
    }

    fn play(&mut self, history: &[Step], form: Option<Form>) -> Result<(), TestCaseError> {
        for _ in 0..TRIES {
            self.histories += 1;
            let world = World::new(&self.client, &mut self.tables, &self.name, self.histories).in_form(form);
            match world.play(history) {
                Ok(()) => return Ok(()),
                Err(Stop::Differ(how)) => return Err(TestCaseError::fail(how)),
                Err(Stop::TooSlow) => {}
            }
        }
        panic!("this machine is too slow: {TRIES} times a history of at most twenty steps was interrupted");
    }
}
