//! Answers, their rows, and their columns as what we read them for.

use postgres::types::Type;
use postgres::{SimpleQueryMessage, SimpleQueryRow};

use crate::backend::Version;
use crate::error::{ErrorCode, LockError, Result};

/// A row: as text, or with the types of its columns.
pub(crate) enum Row {
    Text(SimpleQueryRow),
    Typed(postgres::Row),
}

/// The rows of one message, by statement.
pub(crate) struct Answers(Vec<Vec<Row>>);

impl Answers {
    /// The answers to a message of text.
    pub(crate) fn of_message(messages: Vec<SimpleQueryMessage>) -> Self {
        let mut statements = Vec::with_capacity(8);
        let mut rows = Vec::new();
        for message in messages {
            match message {
                SimpleQueryMessage::Row(row) => rows.push(Row::Text(row)),
                SimpleQueryMessage::CommandComplete(_) => statements.push(std::mem::take(&mut rows)),
                _ => {}
            }
        }
        Self(statements)
    }

    /// The answer to one statement of the driver's.
    pub(crate) fn of_query(rows: Vec<postgres::Row>) -> Self {
        Self(vec![rows.into_iter().map(Row::Typed).collect()])
    }

    /// The only row of a statement, counted from the message's last.
    pub(crate) fn row(&self, from_last: usize) -> Result<Option<&Row>> {
        match self.rows(from_last)? {
            [] => Ok(None),
            [row] => Ok(Some(row)),
            _ => Err(malformed()),
        }
    }

    /// The rows of a statement, counted from the message's last.
    pub(crate) fn rows(&self, from_last: usize) -> Result<&[Row]> {
        self.0.iter().rev().nth(from_last).map(Vec::as_slice).ok_or_else(malformed)
    }

    /// The same without the message's last statement.
    pub(crate) fn without_last(mut self) -> Self {
        self.0.pop();
        self
    }

    /// The rows of the message's last statement, to keep.
    pub(crate) fn into_last_rows(mut self) -> Vec<Row> {
        self.0.pop().unwrap_or_default()
    }
}

/// A column as text; `None` for NULL.
pub(crate) fn text(row: &Row, column: usize) -> Result<Option<&str>> {
    match row {
        Row::Text(row) => row.try_get(column),
        Row::Typed(row) => row.try_get(column),
    }
    .map_err(|cause| malformed().with_source(cause))
}

/// A column as a row's version.
pub(crate) fn version(row: &Row, column: usize) -> Result<Version> {
    required(text(row, column)?)?.parse().map(Version::new).map_err(|_| malformed())
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
