//! `completions`, `man`: made of the description of the command line.

use std::io::{self, Write as _};

use clap::CommandFactory as _;

use crate::args::{Cli, Completions, Man};
use crate::failure::{Ended, Failure};

pub(crate) fn completions(completions: &Completions) -> Ended {
    let mut text = Vec::new();
    clap_complete::generate(completions.shell, &mut Cli::command(), "syncguard", &mut text);
    write_out(&text)
}

pub(crate) fn man(man: &Man) -> Ended {
    let Some(dir) = &man.dir else {
        let mut text = Vec::new();
        clap_mangen::Man::new(Cli::command()).render(&mut text).map_err(failed)?;
        return write_out(&text);
    };
    std::fs::create_dir_all(dir).map_err(failed)?;
    clap_mangen::generate_to(Cli::command(), dir).map_err(failed)?;
    Ok(0)
}

fn write_out(text: &[u8]) -> Ended {
    match io::stdout().write_all(text) {
        Ok(()) => Ok(0),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(Failure::NoReader),
        Err(error) => Err(failed(error)),
    }
}

fn failed(error: io::Error) -> Failure {
    Failure::Io("the pages could not be written".to_owned(), error)
}
