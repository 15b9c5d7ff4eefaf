//! The parts that ask nobody: keys, hashes, identifiers, decisions. `cargo bench --bench pure`
#![allow(clippy::unwrap_used)]

use divan::{Bencher, black_box};
use syncguard::{
    AdvisoryKey, Fence, TIME_TOLERANCE_MS, hash_key, is_live, make_storage_key, normalize_and_validate_key,
};

fn main() {
    divan::main();
}

/// Bytes: a usual key, one that is still stored as it is, one whose hash is stored.
const KEYS: [usize; 3] = [10, 240, 512];

fn key(length: usize) -> String {
    "payment:42/é"
        .chars()
        .cycle()
        .scan(0, |bytes, c| {
            *bytes += c.len_utf8();
            (*bytes <= length).then_some(c)
        })
        .collect()
}

#[divan::bench(args = KEYS)]
fn storage_key(bencher: Bencher<'_, '_>, length: usize) {
    let key = key(length);
    bencher.bench(|| make_storage_key("", black_box(&key), 255, 6).unwrap());
}

#[divan::bench(args = KEYS)]
fn normalized(bencher: Bencher<'_, '_>, length: usize) {
    let key = key(length);
    bencher.bench(|| normalize_and_validate_key(black_box(&key)).unwrap());
}

#[divan::bench]
fn hash_for_a_log_line(bencher: Bencher<'_, '_>) {
    bencher.bench(|| hash_key(black_box("payment:42")));
}

#[divan::bench]
fn session_lock_key(bencher: Bencher<'_, '_>) {
    bencher.bench(|| AdvisoryKey::from_text(black_box("User@Example.com ")));
}

#[divan::bench]
fn fence_to_text_and_back(bencher: Bencher<'_, '_>) {
    let fence = Fence::new(123_456_789).unwrap();
    bencher.bench(|| black_box(fence).to_string().parse::<Fence>().unwrap());
}

#[divan::bench]
fn liveness(bencher: Bencher<'_, '_>) {
    bencher.bench(|| is_live(black_box(1_000), black_box(999), TIME_TOLERANCE_MS));
}
