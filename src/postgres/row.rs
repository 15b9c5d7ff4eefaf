//! Rows of answers, and their columns as what we read them for.

use postgres::SimpleQueryRow;
use postgres::types::Type;

use crate::error::{ErrorCode, LockError, Result};

/// A row: as text, or with the types of its columns.
pub(crate) enum Row {
    Text(SimpleQueryRow),
    Typed(postgres::Row),
}

/// A column as text; `None` for NULL.
pub(crate) fn text(row: &Row, column: usize) -> Result<Option<&str>> {
    match row {
        Row::Text(row) => row.try_get(column),
        Row::Typed(row) => row.try_get(column),
    }
    .map_err(|cause| malformed().with_source(cause))
}

/// A column as a number; `None` for NULL.
pub(crate) fn int(row: &Row, column: usize) -> Result<Option<i64>> {
    match row {
        Row::Text(_) => match text(row, column)? {
            None => Ok(None),
            Some(digits) => digits.parse().map(Some).map_err(|_| malformed()),
        },
        Row::Typed(row) => match row.columns().get(column).map(postgres::Column::type_) {
            Some(&Type::INT4) => row.try_get(column).map(|number: Option<i32>| number.map(i64::from)),
            _ => row.try_get(column),
        }
        .map_err(|cause| malformed().with_source(cause)),
    }
}

/// A column that is true or false; `None` for NULL.
pub(crate) fn flag(row: &Row, column: usize) -> Result<Option<bool>> {
    match row {
        Row::Text(_) => Ok(text(row, column)?.map(|letter| letter == "t")),
        Row::Typed(row) => row.try_get(column).map_err(|cause| malformed().with_source(cause)),
    }
}

/// The value of a column that cannot be NULL.
pub(crate) fn required<T>(value: Option<T>) -> Result<T> {
    value.ok_or_else(malformed)
}

/// Something that PostgreSQL with our tables does not answer.
pub(crate) fn malformed() -> LockError {
    LockError::new(ErrorCode::Internal).with_message(
        "the lock tables hold something that no SyncGuard client writes: check who else writes them",
    )
}
