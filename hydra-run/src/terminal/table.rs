//! Plain-text tables.

/// A table with a heading and columns as wide as their longest cells.
pub struct Table {
    /// The arguments of [`Table::new`].
    columns: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table of these columns: `<name` for a left-aligned column, `>name` for a right-aligned one.
    pub fn new<T: Into<String>>(columns: impl IntoIterator<Item = T>) -> Self {
        Self { columns: columns.into_iter().map(Into::into).collect(), rows: Vec::new() }
    }

    /// Appends a row; missing cells are empty.
    pub fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    /// The text; every line ends with a newline.
    pub fn render(&self) -> String {
        let heading: Vec<String> = self.columns.iter().map(|column| column[1..].to_owned()).collect();
        let lines: Vec<&Vec<String>> = std::iter::once(&heading).chain(&self.rows).collect();
        let width = |i: usize| lines.iter().filter_map(|line| line.get(i)).map(|c| c.chars().count()).max();
        let widths: Vec<usize> = (0..self.columns.len()).map(|i| width(i).unwrap_or(0)).collect();
        lines.iter().map(|line| self.line(line, &widths)).collect()
    }

    fn line(&self, cells: &[String], widths: &[usize]) -> String {
        let cell = |(i, column): (usize, &String)| {
            let (text, width) = (cells.get(i).map_or("", String::as_str), widths[i]);
            if column.starts_with('<') { format!("{text:<width$}") } else { format!("{text:>width$}") }
        };
        let line: Vec<String> = self.columns.iter().enumerate().map(cell).collect();
        format!("{}\n", line.join("  ").trim_end())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_they_need_to_be() {
        let mut table = Table::new(["<task", ">loss", "<"]);
        table.row(vec!["a".into(), "12.5".into(), "x".into()]);
        table.row(vec!["longer".into(), "3".into()]);
        assert_eq!(table.render(), "task    loss\na       12.5  x\nlonger     3\n");
    }
}
