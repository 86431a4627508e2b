"""Methods for tables: trees and exact models from sums alone."""
