//! What needs no server: values, the memory backend, telemetry over it, and the sources and documents
//! of the project themselves.
//!
//! | file | what it shows |
//! | --- | --- |
//! | `architecture` | The house rules that a compiler does not check: who may use whom, and what must not be there. |
//! | `documents` | What the documents say about the repository is true, where a machine can tell: links lead |
//! | `election` | Leader election over the memory backend: what others got wrong, by name, and what ends a campaign. |
//! | `files` | Every file of the repository, as a file: how long it may be, and what must not stand in it. |
//! | `front_page` | What a stranger sees first on docs.rs: no name before `PgLockClient` that few need, links that work from |
//! | `memory` | The memory backend's own powers: time, faults, losses, and calls that hang. |
//! | `memory_contract` | The contract, on the memory backend: bare, under telemetry, and on the system's time. |
//! | `once` | Jobs that run once per slot, over the memory backend: what becomes of a run when its calls fail, its lease is |
//! | `own_code` | A program's own tests, written as its author would: with the public documentation and nothing else. |
//! | `permits` | Semaphores over the memory backend: what guards and waiters make of permits. |
//! | `public_contract` | The names and shapes that other programs are written against. It has to compile: what is moved, |
//! | `recipes` | The page of recipes has the code that `tests/recipes/` runs, word for word, and nothing that is not run. |
//! | `requirements` | Every requirement has a proof that exists: requirements.tsv names, for each, the tests that show it |
//! | `security_fuzz` | What the fuzz targets in `fuzz/` check, on random input: bytes of any kind, and pieces of what the |
//! | `several` | Several keys at once, over the memory backend: all or none, waited for, renewed and lost together. |
//! | `specification` | What all SyncGuard clients have in common and no other test says: constants, names, what is not |
//! | `telemetry` | The decorator: what it reports, and that nothing a callback does reaches an operation. |
//! | `values` | Values that every SyncGuard client computes alike: vectors/keys.json comes from another |
//! | `whole_locks` | The whole of a lock as one event: how it was waited for, how long it was held, and how that ended; once, |

mod api_guidelines;
mod architecture;
mod documents;
mod election;
mod files;
mod front_page;
mod memory;
mod memory_contract;
mod once;
mod own_code;
mod permits;
mod public_contract;
mod recipes;
mod requirements;
mod security_fuzz;
mod several;
mod source;
mod specification;
mod telemetry;
mod values;
mod whole_locks;
